"""Threads that simulated ranks start may compute, and belong to their rank; if they communicate, the run ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Unsupported
from pdlcheck.worlds import get_world


@pytest.fixture
def sim():
    return get_world("sim")


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def in_a_pool(function):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def in_a_thread_of_a_thread(function):
    in_a_thread(lambda: in_a_thread(function))


def swallowed(function):
    """Call the function in a thread that ignores its errors."""

    def call():
        with contextlib.suppress(Exception):
            function()

    in_a_thread(call)


ALL = [in_a_thread, in_a_pool, in_a_thread_of_a_thread, swallowed]
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@quiet
@pytest.mark.parametrize("start", ALL)
@pytest.mark.parametrize("last", [True, False], ids=["then nothing", "then an operation"])
def test_a_thread_that_communicates_ends_the_run_with_its_line(sim, start, last):
    begun = []

    def saves_beside_training():
        begun.append(dist.get_rank())
        if len(begun) == 3:  # if nothing follows, the others have returned
            start(lambda: dist.barrier())
        if not last:
            dist.all_reduce(torch.ones(2))

    with pytest.raises(Unsupported, match=r"thread that rank \d started communicates, at .*test_rank_threads\.py:\d+"):
        sim.run(saves_beside_training, world_size=3)
    assert sim.run(dist.get_rank, world_size=3) == [0, 1, 2]


@quiet
def test_a_group_that_the_thread_was_handed_is_no_way_around(sim):
    def saves_beside_training():
        group = dist.new_group([0, 1])
        in_a_thread(lambda: dist.all_reduce(torch.ones(1), group=group))

    with pytest.raises(Unsupported, match="a simulated rank is one thread: communicate in the rank itself"):
        sim.run(saves_beside_training, world_size=2)


@quiet
def test_a_thread_that_makes_a_group_ends_the_run(sim):
    def makes_a_group_for_its_saves():
        in_a_thread(lambda: dist.new_group([0, 1]))

    with pytest.raises(Unsupported, match=r"a thread that rank [01] started communicates, at .*test_rank_threads\.py"):
        sim.run(makes_a_group_for_its_saves, world_size=2)


@pytest.mark.parametrize("start", ALL)
def test_a_thread_that_computes_knows_its_rank_and_changes_nothing(sim, start):
    def counts():
        seen = []
        start(lambda: seen.append((dist.is_initialized(), dist.get_rank(), dist.get_world_size())))
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total)
        return seen, total.item()

    assert sim.run(counts, world_size=3) == [([(True, rank, 3)], 3) for rank in range(3)]
    assert not dist.is_initialized()


FEW = """
import re, resource, torch.distributed as dist
from pdlcheck.errors import WorldTooSmall
from pdlcheck.worlds import get_world

world = get_world("sim")
assert world.run(dist.get_rank, world_size=2) == [0, 1]
used = 1024 * int(re.search(r"VmSize:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
try:
    world.run(dist.get_rank, world_size=1000)
except WorldTooSmall as error:
    assert error.world_size == 1000 and 0 < error.available < 1000, error
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert world.run(dist.get_rank, world_size=1000) == list(range(1000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: its limits of memory")
def test_too_many_ranks_for_this_system_are_refused_and_others_run():
    done = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "needs 1000 simulated ranks, each a thread, and the system started" in done.stdout
    assert "(can't start new thread): raise its limit" in done.stdout
