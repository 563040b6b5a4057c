"""Ctrl-C in a pytest run: pytest says as much as without this package, and does not take seconds to prepare it."""

from __future__ import annotations

import pytest

CONFTEST = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_keyboard_interrupt(excinfo):
    print(f"{len(excinfo.traceback)} frames")
"""
TEST = """
import signal

def test_long():
    signal.raise_signal(signal.SIGINT)
"""


@pytest.fixture
def interrupted(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST)
    return pytester


@pytest.fixture(autouse=True)
def sigint_is_on(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C raises, also where a shell started this in the background and so had it ignored."""
    pytester.makepyfile(sigint_is_on="import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")


def test_only_the_frame_that_is_shown_is_rendered(interrupted):
    result = interrupted.runpytest_subprocess("-s", "-p", "sigint_is_on")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["* 1 frames", "*_is_rendered.py:4: KeyboardInterrupt"])


def test_one_that_an_import_has_lost_ends_the_run_before_tests(pytester):
    pytester.makepyfile(
        """
        import contextlib, os, signal

        with contextlib.suppress(KeyboardInterrupt):  # as torch does where it looks for numpy
            signal.raise_signal(signal.SIGINT)

        def test_long():
            os.write(2, b"it runs")
        """
    )
    result = pytester.runpytest_subprocess("-s", "-p", "sigint_is_on")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "it runs" not in result.stderr.str()


def test_full_trace_keeps_every_frame(interrupted):
    result = interrupted.runpytest_subprocess("-s", "-p", "sigint_is_on", "--full-trace")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*", "*_pytest/runner.py:*", "*py:4: KeyboardInterrupt"])
    assert "1 frames" not in result.stdout.str()
