"""The report of a failure does not depend on the time that ranks take to send it, and no stuck rank delays it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch.distributed as dist

from pdlcheck.errors import RankTimeout
from pdlcheck.worlds import get_world
from pdlcheck.worlds.processes.controller import collect
from pdlcheck.worlds.processes.exchange.own_time import OwnTime, waited_for_cores
from pdlcheck.worlds.processes.world import ProcessWorld

BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"

SLOW_VALUES = """
class Slow:
    def __repr__(self):
        time.sleep(1.0)
        return "what the rank saw"

@pytest.mark.world_size(3)
def test_one_gathers(rank):
    mine = Slow() if rank == 1 else None
    if rank == 1:
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
    else:
        dist.all_reduce(torch.ones(2))
"""

FOUR_FAILURES = """
@pytest.mark.world_size(3)
@pytest.mark.parametrize("again", range(4))
def test_one_gathers(rank, again):
    mine = "what the rank saw"
    if rank != 1:
        dist.all_reduce(torch.ones(2))
        return
    dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
"""

SLOW_TO_LEAVE = """
@pytest.mark.world_size(3)
def test_one_gathers(rank):
    try:
        if rank == 1:
            dist.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2))
        else:
            dist.all_reduce(torch.ones(2))
    finally:
        time.sleep(0.8 * (rank == 1))
"""

SLOW_TO_SEND = """
class Heavy(Exception):
    def __reduce__(self):
        time.sleep(0.8 * ("rank 1" in self.args[0]))
        return Heavy, (*self.args,)

def fails():
    raise Heavy(f"rank {dist.get_rank()} says so")

def test_both_are_told(world):
    with pytest.raises(Heavy, match="^rank 0 says so") as caught:
        world.run(fails, world_size=2)
    assert "rank 1 failed at the same line: rank 1 says so" in str(caught.value.__notes__)
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_line_and_the_values_of_a_rank_that_is_slow_to_write_its_report(run, world):
    text = run(SLOW_VALUES, "--showlocals", world=world).stdout.str()
    assert ">           dist.all_gather(" in text
    assert "mine       = what the rank saw" in text


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_line_of_a_rank_that_has_something_to_do_before_it_ends(run, world):
    text = run(SLOW_TO_LEAVE, world=world).stdout.str()
    assert ">               dist.all_gather(" in text or ">           dist.all_gather(" in text


def test_what_a_rank_raises_that_is_slow_to_send_it(run):
    run(SLOW_TO_SEND).assert_outcomes(passed=1)


def sleeps():
    time.sleep(60)


def computes():
    while True:
        pass


def lets_no_python_run():
    ctypes.PyDLL(None).sleep(60)


def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("stuck", [sleeps, computes, lets_no_python_run, is_stopped])
@pytest.mark.parametrize("watch", [True, False])
def test_a_stuck_rank_does_not_delay_the_failure_of_another_one(stuck, watch):
    def body():
        if dist.get_rank() == 1:
            stuck()
        time.sleep(0.2)  # by then the other rank is stuck
        raise LookupError("no such sample")

    world = get_world("gloo", watch=watch)
    try:
        world.pids(2)
        began = time.monotonic()
        with pytest.raises(LookupError, match="no such sample"):
            world.run(body, world_size=2)
        assert time.monotonic() - began < 10  # it takes 0.7 s, but the machine may be loaded
    finally:
        world.close()


def test_a_rank_that_reports_for_ever_has_no_more_time_than_the_call(monkeypatch):
    class Endless(Exception):
        def __reduce__(self):
            time.sleep(60)

    def body():
        if dist.get_rank() == 1:
            raise Endless
        time.sleep(0.2)
        raise LookupError("no such sample")

    monkeypatch.setattr(collect, "REPORTS_S", 1.0)
    world = get_world("gloo", timeout_s=2.0)
    try:
        with pytest.raises((LookupError, RankTimeout), match=r"no such sample|no result within"):
            world.run(body, world_size=2)
    finally:
        world.close()


@pytest.fixture
def loaded():
    """Load the machine with many processes that only compute."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(20)]
    yield
    for process in busy:
        process.kill()
    for process in busy:
        process.wait()


@pytest.mark.slow
def test_the_line_and_the_values_on_a_loaded_machine(run, loaded):
    text = run(FOUR_FAILURES, "--showlocals", world="gloo").stdout.str()
    assert text.count(">       dist.all_gather(") == 4
    assert text.count("mine       = 'what the rank saw'") == 4
    assert text.count("rank       = 1") == 4


@pytest.fixture
def starved():
    """Yield the pid of one of two processes that only compute, on the same core."""
    core = str(min(os.sched_getaffinity(0)))
    both = [subprocess.Popen([sys.executable, "-c", BUSY, core], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in both:
            process.stdout.readline()
        yield both[0].pid
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.skipif(waited_for_cores(os.getpid()) is None, reason="needs /proc/PID/schedstat, which Linux has")
def test_the_own_time_of_a_process_stands_still_while_it_waits_for_a_core(starved):
    began, own = time.monotonic(), OwnTime(partial(waited_for_cores, starved))
    elapsed = 0.0
    while elapsed < 5 and (elapsed < 0.5 or own.spent() >= 0.75 * elapsed):  # a wait counts once it is over
        time.sleep(0.1)
        elapsed = time.monotonic() - began
    assert 0 < own.spent() < 0.75 * elapsed


def test_a_process_that_never_gets_a_core_is_not_waited_for_for_ever():
    waited = iter([0.0, 1000.0])
    own = OwnTime(lambda: next(waited))
    time.sleep(0.1)
    assert 0.003 <= own.spent() < 1


def test_the_own_time_of_a_process_that_sleeps_goes_on():
    waited = iter([1.0, 1.0])
    own = OwnTime(lambda: next(waited))
    time.sleep(0.05)
    assert own.spent() >= 0.05


def test_without_word_of_the_system_time_goes_slowly():
    own = OwnTime(lambda: None)
    time.sleep(0.08)
    assert 0.01 <= own.spent() < 1
    assert waited_for_cores(2**22 + 1) is None  # no process has this number


def test_a_rank_that_dies_after_its_result_is_replaced_before_the_next_call(capsys):
    def program():
        if dist.get_rank() == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            time.sleep(1.0)  # the call lasts until the other rank has died
        return os.getpid()

    world = ProcessWorld()
    try:
        before = world.run(program, world_size=2)
        after = world.run(os.getpid, world_size=2)
        assert not set(before) & set(after)
        text = "pdlcheck: rank 1 was killed by SIGKILL while nothing ran on it; 2 new processes take over\n"
        assert capsys.readouterr().err == text
    finally:
        world.close()
