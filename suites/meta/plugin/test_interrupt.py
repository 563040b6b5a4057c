"""Ctrl-C in a pytest run: it reports where each rank is, and does not delay pytest's own report."""

from __future__ import annotations

import os
import time

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

def test_calls_ranks(world): pass
"""


@pytest.fixture
def interrupted(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TEST)
    return pytester


@pytest.fixture(autouse=True)
def sigint_is_on(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Ctrl-C raise, even if a shell disabled it for background processes."""
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

        def test_calls_ranks(world): pass
        """
    )
    result = pytester.runpytest_subprocess("-s", "-p", "sigint_is_on")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "it runs" not in result.stderr.str()


def test_a_session_without_ranks_has_ctrl_c_as_python_handles_it(pytester):
    pytester.makepyfile(
        """
        import signal

        def test_plain():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        """
    )
    assert pytester.runpytest_subprocess("-p", "sigint_is_on").ret == pytest.ExitCode.OK


def test_full_trace_keeps_every_frame(interrupted):
    result = interrupted.runpytest_subprocess("-s", "-p", "sigint_is_on", "--full-trace")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*", "*_pytest/runner.py:*", "*py:4: KeyboardInterrupt"])
    assert "1 frames" not in result.stdout.str()


PRESSED = """
import os, pathlib, signal, threading, time

def press(times):
    while not pathlib.Path("hangs").exists():
        time.sleep(0.01)
    for _ in range(times):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

def pytest_runtestloop(session):
    threading.Thread(target=press, args=[TIMES], daemon=True).start()
"""
HANGS = """
import ctypes, os, pathlib, time
import pytest, torch, torch.distributed as dist

@pytest.fixture
def process(rank):
    pathlib.Path(f"process {os.getpid()}").touch()

@pytest.mark.world_size(3)
def test_long(rank, process):
    x = torch.ones(2)
    dist.all_reduce(x)
    if rank == 1:
        pathlib.Path("hangs").touch()
        WAITS
    if rank != 2:
        dist.all_reduce(x)
"""


def _press(pytester, times, waits, *options):
    """Press Ctrl-C while rank 1 waits; return the result after all rank processes have ended."""
    pytester.makeconftest(PRESSED.replace("TIMES", str(times)))
    pytester.makepyfile(test_long=HANGS.replace("WAITS", waits))
    result = pytester.runpytest_subprocess("-p", "sigint_is_on", *options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    ranks = [int(path.name.split()[1]) for path in pytester.path.glob("process *")]
    until = time.monotonic() + 20
    while left := [pid for pid in ranks if _runs(pid)]:
        assert time.monotonic() < until, f"processes {left} are left"
        time.sleep(0.01)
    return result, len(ranks)


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_it_says_where_each_rank_is(pytester, world):
    result, processes = _press(pytester, 1, "while True: pass", "--world", world)
    assert processes == (3 if world == "gloo" else 1)
    posted = "all_reduce(SUM) of float32 (2,), default group (ranks 0-2), collective"
    result.stdout.fnmatch_lines(
        [
            "interrupted before ranks * of 3 had ended",
            f"  rank 0: *in {posted} 1, at test_long.py:16",
            f"  rank 1: busy at test_long.py:14; last operation {posted} 0, at test_long.py:11",
            "  rank 2: has returned; last *" if world == "gloo" else "  rank 2: *",  # may wait for its turn
            "!!!!* KeyboardInterrupt !!!!*",
        ]
    )


@pytest.mark.slow
def test_one_that_does_not_answer_is_not_waited_for(pytester):
    result, processes = _press(pytester, 1, "ctypes.PyDLL(None).sleep(60)", "--world", "gloo")
    assert processes == 3
    result.stdout.fnmatch_lines(["  rank 1: busy outside Python; last operation all_reduce(SUM) *"])


def test_a_second_one_ends_the_run_at_once(pytester):
    result, processes = _press(pytester, 2, "ctypes.PyDLL(None).sleep(60)", "--world", "gloo")
    assert processes == 3
    assert "rank 1:" not in result.stdout.str()
