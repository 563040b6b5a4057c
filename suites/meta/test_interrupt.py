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
    pytester.makeconftest(CONFTEST + "\nimport signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n")
    pytester.makepyfile(TEST)
    return pytester


def test_only_the_frame_that_is_shown_is_rendered(interrupted):
    result = interrupted.runpytest_subprocess("-s")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["* 1 frames", "*_is_rendered.py:4: KeyboardInterrupt"])


def test_full_trace_keeps_every_frame(interrupted):
    result = interrupted.runpytest_subprocess("-s", "--full-trace")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*", "*_pytest/runner.py:*", "*py:4: KeyboardInterrupt"])
    assert "1 frames" not in result.stdout.str()
