"""Five thousand simulations in one process leave no thread, file or tensor behind, and almost no memory."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.errors import Deadlock
from pdlcheck.worlds import get_world

RUNS = 5_000
BATCH = 1_000


def well():
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    work.wait()


def badly():
    dist.recv(torch.ones(1), 1 - dist.get_rank())


def asks_for_the_future():
    done = []
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(lambda future: done.append(future.value()))
    work.wait()
    assert done


def sends():
    work = dist.isend(torch.ones(1), 1) if dist.get_rank() == 0 else dist.irecv(torch.ones(1), 0)
    while not work.is_completed():
        pass


def trains():
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("program", [well, asks_for_the_future, sends, trains])
def test_a_run_leaves_nothing_to_the_garbage_collector(program):
    """A reference cycle keeps its tensors until the collector runs, which takes longer than the run."""
    world = get_world("sim")
    world.run(program, world_size=2)
    gc.collect()
    gc.disable()
    try:
        world.run(program, world_size=2)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [type(thing).__name__ for thing in gc.garbage] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.slow
def test_five_thousand_simulations_leave_no_thread_no_file_and_no_tensor():
    kept = []
    for batch in range(RUNS // BATCH):
        for number in range(BATCH):
            _run_once(fails=number % 10 == 0, seed=batch * BATCH + number)
        gc.collect()
        kept.append(_held())
    threads, files, tensors, pages = zip(*kept, strict=True)
    assert len(set(threads)) == 1
    assert len(set(files)) == 1
    assert len(set(tensors[1:])) == 1  # the first runs also remove leftovers of earlier tests
    grown = (pages[-1] - pages[1]) * os.sysconf("SC_PAGE_SIZE")
    # A failing run makes its groups again, which leaves about 1 KB; torch keeps a part of each.
    assert grown / (RUNS - 2 * BATCH) < 512, f"{grown / 2**20:.1f} MiB more after {RUNS - 2 * BATCH} runs"


def _run_once(fails, seed):
    world = get_world("sim", seed=seed)
    if not fails:
        world.run(well, world_size=2)
        return
    try:
        world.run(badly, world_size=2)
    except Deadlock:
        return
    raise AssertionError("two receives head to head are a deadlock")


def _held():
    """Return the counts of threads, open files, tensors, and pages of resident memory of this process."""
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1])
    return threading.active_count(), len(os.listdir("/proc/self/fd")), tensors, resident
