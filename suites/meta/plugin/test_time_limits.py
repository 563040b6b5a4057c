"""Time limits of tests, with pytest-timeout and without, and ranks that do not end."""

from __future__ import annotations

import pytest

from ..conftest import HEAD

LIMITED = """
@W
@pytest.mark.timeout(1.5)
def test_hangs(rank):
    if rank == 0:
        time.sleep(50)
    dist.barrier()

@W
def test_ini(rank):
    dist.barrier()
    if rank == 1:
        time.sleep(50)

@W
def test_after(rank):
    dist.barrier()

@pytest.mark.timeout(0.5, method="signal")
def test_controller(world):
    time.sleep(50)

def sleep():
    time.sleep(50)

@pytest.mark.timeout(1)
def test_function(world):
    world.run(sleep, world_size=2)

@W
@pytest.mark.timeout(60, func_only=True)
def test_enough(rank):
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_the_limits_of_pytest_timeout_are_kept_by_the_ranks(run, pytester):
    pytester.makeini("[pytest]\ntimeout = 2\ntimeout_method = thread\n")  # in a rank this method would end the process
    result = run(LIMITED, new_process=True)
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            "E   RankTimeout: no result within 1.[345] s from ranks 0, 1 of 2",
            "E     rank 0: busy at test_inner.py:9",
            "E     rank 1: busy in barrier, default group (ranks 0, 1), collective 0, at test_inner.py:10",
            "E   stack of rank 0, innermost call last:",
            'E     File "*test_inner.py", line 9, in test_hangs',
            "E   stack of rank 1, innermost call last:",
            'E     File "*test_inner.py", line 10, in test_hangs',
            "E   RankTimeout: no result within * s from rank 1 of 2",
            "E     rank 0: has returned; last operation barrier, default group *, collective 0, at test_inner.py:14",
            "E   *Failed: Timeout *from pytest-timeout*",
            "E   *RankTimeout: no result within * s from ranks 0, 1 of 2",
            "E*   ranks 0, 1: busy at test_inner.py:27",
        ]
    )
    assert "/_pytest/" not in result.stdout.str(), "the stacks are the user's"


def test_the_marker_counts_without_pytest_timeout_too(run):
    result = run(LIMITED, "-p", "no:timeout", "-k", "hangs or after", "--strict-markers")
    result.assert_outcomes(passed=1, failed=1, deselected=4)
    result.stdout.fnmatch_lines(["E   RankTimeout: no result within 1.[345] s from ranks 0, 1 of 2"])


SIMULATED = """
import signal, time

@pytest.fixture
def own(rank):
    yield rank
    print(f"rank {rank} is torn down")

@pytest.fixture
def slow(rank, own):
    if rank == 1:
        time.sleep(5)

@W
@pytest.mark.timeout(1.5)
def test_sleeps(rank, own):
    if rank == 1:
        time.sleep(5)
    dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_sleeps_beside_its_folder(rank, own, tmp_path):
    if rank == 1:
        time.sleep(5)
    dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_computes(rank, own):
    while rank == 1:
        pass
    dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_communicates(rank, own):
    while True:
        dist.barrier()

@W
@pytest.mark.timeout(1.5)
def test_in_a_fixture(slow): pass

@W
@pytest.mark.timeout(1.5)
@pytest.mark.schedules(5)
def test_under_schedules(rank, own):
    while True:
        pass

@W
def test_after(rank, own, tmp_path):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    if rank == 1:  # by now those that slept have woken up
        time.sleep(5)
"""


@pytest.mark.slow
def test_simulated_ranks_that_do_not_end_are_replaced(pytester):
    pytester.makepyfile(test_inner=HEAD + SIMULATED)
    result = pytester.runpytest_subprocess("--world", "sim", "-p", "no:randomly", "-rA", timeout=100)
    result.assert_outcomes(passed=1, failed=5, errors=1, warnings=0)
    result.stdout.fnmatch_lines(
        [
            "E   RankTimeout: no result within 1.[345] s from ranks 0, 1 of 2",
            "E     rank 1: busy at test_inner.py:21, its turn has lasted * s",
            "E   stack of rank 1, innermost call last:",
            'E     File "*test_inner.py", line 21, in test_sleeps',
            "FAILED test_inner.py::test_sleeps*sim-2* - *RankTimeout: *",
        ]
    )
    text = result.stdout.str()
    assert "threading.py" not in text, "the stacks are the user's"
    assert text.count("rank 1 does not stop and is left behind; what follows has fresh ranks") >= 3, text
    assert text.count("rank 0 is torn down") == text.count("rank 1 is torn down") == 6, text


CHANGES = """
import os, threading
from unittest import mock
import state

@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.world_size(2)
@pytest.mark.timeout(1)
def test_changes(rank, monkeypatch, stops):
    state.rank = rank
    os.environ["MINE"] = str(rank)
    monkeypatch.setattr(os, "sep", "patched")
    mock.patch.object(os, "linesep", "patched").start()
    while stops:
        pass
    threading.Event().wait(3)

@pytest.mark.world_size(2)
def test_after():
    assert (state.rank, os.environ.get("MINE"), os.sep, os.linesep) == (None, None, "/", "\\n")
"""


def test_what_a_simulated_rank_has_changed_is_undone_if_it_is_given_up(pytester):
    pytester.makepyfile(test_inner=HEAD + CHANGES, state="rank = None")
    pytester.makeini("[pytest]\npdlcheck_own_globals = state\n")
    result = pytester.runpytest_subprocess("--world", "sim", "-p", "no:randomly", timeout=60)
    result.assert_outcomes(passed=1, failed=2)


@pytest.mark.parametrize("place", ["test", "fixture"])
def test_ctrl_c_ends_a_run_of_simulated_ranks_that_sleep(pytester, place):
    press = """
    if rank == 1:
        threading.Timer(0.5, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        time.sleep(1000)
"""
    bodies = {"test": ("", press), "fixture": (press, "")}[place]
    source = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.fixture
def fixture(rank, monkeypatch):
    "no more"{}

@W
def test_sleeps(rank, fixture, tmp_path):
    "no more"{}
"""
    pytester.makepyfile(test_inner=HEAD + source.format(*bodies))
    result = pytester.runpytest_subprocess("--world", "sim", timeout=60)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*KeyboardInterrupt*", "*no tests ran in*"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["rank", "world"])
def test_the_limit_of_the_first_test_on_simulated_ranks_does_not_count_the_import_of_torch(pytester, arguments):
    pytester.makeconftest(
        """
        import sys, time

        class Slow:
            def find_spec(self, name, path, target=None):
                if name == "torch":
                    time.sleep(4)

        sys.meta_path.insert(0, Slow())
        """
    )
    pytester.makepyfile(
        f"""
        import pytest, sys
        assert "torch" not in sys.modules

        {"@pytest.mark.world_size(2)" if arguments == "rank" else ""}
        @pytest.mark.timeout(4)
        def test_first({arguments}): pass
        """
    )
    pytester.runpytest_subprocess("--world", "sim", timeout=100).assert_outcomes(passed=1)


WITHOUT = """
import pdlcheck.item_runners.simulated.runner
pdlcheck.item_runners.simulated.runner.LIMIT_S = 1.0

@W
def test_computes(rank):
    dist.barrier()
    while rank == 1:
        pass

def compute():
    while True:
        pass

def test_function(world):
    world.run(compute, world_size=2)

@W
@pytest.mark.timeout(50)
def test_has_more(rank):
    time.sleep(1.2)

@W
@pytest.mark.schedules(50)
def test_under_schedules(rank):
    dist.barrier()
    while rank == 1:
        pass

@W
def test_after(rank):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["no:timeout", "timeout"])
def test_simulated_ranks_have_a_limit_where_nobody_sets_one(run, option):
    result = run(WITHOUT, "-p", option, world="sim", new_process=True)
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "E   RankTimeout: no result within 1 s from rank* of 2",
            "E     rank 0: * barrier, default group (ranks 0, 1), collective 0, at test_inner.py:10",
            "E     rank 1: busy at test_inner.py:11, its turn has lasted * s; last operation barrier, *",
            "E       *RankTimeout: no result within 1 s from ranks 0, 1 of 2",
            "E   RankTimeout: no result within 1 s from rank* of 2",
            "E     rank 1: busy at test_inner.py:30, its turn has lasted * s; last *",
        ]
    )


KEEPS_THE_LOCK = """
import ctypes

@W
@pytest.mark.timeout({limit_s})
def test_in_c(rank):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        ctypes.PyDLL(None).usleep(2_500_000)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_simulated_rank_that_keeps_the_interpreter_lock_is_told_where_it_was(run):
    result = run(KEEPS_THE_LOCK.format(limit_s=1.5), world="sim", new_process=True)
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"E   RankTimeout: no result within 1\.\d* s from ranks 0, 1 of 2",
            r"E     rank 0: (waits for its turn|in all_reduce)",
            r"E     rank 1: busy at test_inner\.py:12, its turn has lasted ([2-9]\.\d) s; last operation all_reduce",
        ]
    )


def test_a_rank_that_keeps_the_interpreter_lock_within_its_limit_passes(run):
    run(KEEPS_THE_LOCK.format(limit_s=60), world="sim").assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_debugger_in_a_simulated_rank_has_no_limit(pytester):
    pytester.makepyfile(
        test_inner=HEAD
        + """
import pdb
import pdlcheck.item_runners.simulated.runner
pdlcheck.item_runners.simulated.runner.LIMIT_S = 1.0

class Slow:
    def readline(self):
        time.sleep(2)
        return "c\\n"

@W
def test_stops(rank):
    if rank == 0:
        pdb.Pdb(stdin=Slow(), stdout=sys.__stdout__, nosigint=True).set_trace()
        assert rank == 0
"""
    )
    pytester.runpytest_subprocess("--world", "sim", timeout=60).assert_outcomes(passed=1)


def test_a_world_of_ones_own_has_the_limit_that_it_is_given(pytester):
    pytester.makepyfile(
        test_inner=HEAD
        + """
from pdlcheck.errors import RankTimeout
from pdlcheck.worlds import get_world

def test_own():
    world = get_world("sim", timeout_s=0.5)
    with pytest.raises(RankTimeout, match="no result within 0.5 s from ranks 0, 1 of 2"):
        world.run(time.sleep, 2, world_size=2)
    assert world.run(dist.get_rank, world_size=2) == [0, 1]
"""
    )
    pytester.runpytest_subprocess(timeout=60).assert_outcomes(passed=1)
