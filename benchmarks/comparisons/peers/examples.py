"""Run one side of the comparison in simulated_peers.py in its own process; print the milliseconds of each example.

Usage: python -m peers.examples SIDE PROGRAM WORLD_SIZE EXAMPLES
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import make_semantics

Run = Callable[[Callable[[], None], int], object]


def all_reduce() -> None:
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x[0].item() == dist.get_world_size()


def async_all_reduces() -> None:
    """Call ten of them, each with a little arithmetic on other tensors, which the watch of buffers slows down."""
    a = torch.ones(64)
    for _ in range(10):
        x = torch.ones(64)
        work = dist.all_reduce(x, async_op=True)
        for _ in range(5):
            a = a * 1.0 + 0.5
        work.wait()


def ddp() -> None:
    """Take three steps with a small network."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


PROGRAMS = {program.__name__: program for program in (all_reduce, async_all_reduces, ddp)}


@contextmanager
def simulated(world_size: int) -> Iterator[Run]:
    world = get_world("sim")
    yield lambda program, size: world.run(program, world_size=size)


@contextmanager
def own_globals(world_size: int) -> Iterator[Run]:
    """Yield a simulated world in which each rank has its own globals of one module."""
    from peers import parallel_state

    world = get_world("sim", own_globals=[parallel_state.__name__])

    def run(program: Callable[[], None], size: int) -> None:
        def with_groups() -> None:
            parallel_state.initialize(dist.get_rank())
            program()
            assert parallel_state.get_group_0() == dist.get_rank()  # type: ignore[attr-defined]

        world.run(with_groups, world_size=size)

    yield run


@contextmanager
def unwatched(world_size: int) -> Iterator[Run]:
    """Yield a simulated world without poison, hazards and leaks."""
    world = get_world("sim", semantics=make_semantics(poison=False, hazards=False, leaks=False))
    yield lambda program, size: world.run(program, world_size=size)


@contextmanager
def threaded(world_size: int) -> Iterator[Run]:
    """Yield a world of torch's own threads, set up for each run as its MultiThreadedTestCase does."""
    from torch.testing._internal.distributed import multi_threaded_pg as torchs

    def run(program: Callable[[], None], size: int) -> None:
        world = torchs._install_threaded_pg()
        store, failures = dist.HashStore(), []

        def rank_main(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
                program()
            except BaseException as error:
                failures.append(error)
            finally:
                dist.destroy_process_group()

        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            torchs.ProcessLocalGroup.reset()
            torchs._uninstall_threaded_pg()
        if failures:
            raise failures[0]
        assert world is not None

    yield run


@contextmanager
def gloo(world_size: int) -> Iterator[Run]:
    """Yield processes that run already, without a watch."""
    world = get_world("gloo", watch=False)
    try:
        with world.open(world_size) as ranks:
            yield lambda program, size: ranks.run(program)
    finally:
        world.close()


@contextmanager
def alone(world_size: int) -> Iterator[Run]:
    """Yield a group of one rank that runs the program once for each rank of the others: torch's own work."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def run(program: Callable[[], None], size: int) -> None:
        for _ in range(size):
            program()

    try:
        yield run
    finally:
        dist.destroy_process_group()


SIDES = {side.__name__: side for side in (simulated, own_globals, unwatched, threaded, gloo, alone)}


def main() -> None:
    side, program, world_size, examples = sys.argv[1], PROGRAMS[sys.argv[2]], int(sys.argv[3]), int(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with SIDES[side](world_size) as run:
        for _ in range(3):
            run(program, world_size)
        for _ in range(examples):
            start = time.perf_counter()
            run(program, world_size)
            print((time.perf_counter() - start) * 1e3)


if __name__ == "__main__":
    from peers.examples import main as own_main  # ranks of gloo import the programs by this name

    own_main()
