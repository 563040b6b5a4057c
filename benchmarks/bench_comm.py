"""all_reduce by size: the ring of this project against gloo's own, call by call in turn; and a message around the ring.

A row states the slowest rank's median in the best round;
``algbw = nbytes / seconds``, ``busbw = algbw * 2 (n - 1) / n``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pdlcheck.bench import all_reduce_row, slowest_s
from pdlcheck.primitives import ring_all_reduce, ring_pass
from pdlcheck.worlds import Ranks

SUBJECTS: dict[str, Callable[[torch.Tensor], Any]] = {"ring": ring_all_reduce, "gloo": dist.all_reduce}
QUICK = (2**2, 2**12, 2**16, 2**20, 2**24)
FULL = (2**22, 2**26)


def timed_all_reduces(nbytes: int, calls: int) -> dict[str, list[float]]:
    """Seconds of every call on this rank; the subjects take turns, so that a busy moment hits both."""
    tensor = torch.zeros(nbytes // 4)
    seconds: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for call in range(calls + 1):
        for name, all_reduce in SUBJECTS.items():
            dist.barrier()
            start = time.perf_counter()
            all_reduce(tensor)
            if call:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    tensor.fill_(dist.get_rank() + 1)
    for all_reduce in SUBJECTS.values():
        all_reduce(tensor)
    world_size = dist.get_world_size()
    total = world_size**2 * (world_size + 1) // 2  # two all_reduces of 1 + 2 + ...
    assert (tensor == total).all(), "a fast wrong answer does not count"
    return seconds


@pytest.mark.benchmark(group="all_reduce")
@pytest.mark.parametrize("nbytes", QUICK + FULL, ids="{}B".format)
def test_all_reduce(benchmark: Any, ranks: Ranks, full: bool, nbytes: int) -> None:
    if nbytes in FULL and not full:
        pytest.skip("a large tensor; --full runs it")
    rounds: list[list[dict[str, list[float]]]] = []
    calls = (50 if full else 10) if nbytes <= 2**20 else 5
    benchmark.pedantic(lambda: rounds.append(ranks.run(timed_all_reduces, nbytes, calls)), rounds=3)
    medians = {name: min(slowest_s([rank[name] for rank in everyone]) for everyone in rounds) for name in SUBJECTS}
    for name, seconds in medians.items():
        row = all_reduce_row(nbytes, ranks.world_size, seconds=seconds)
        benchmark.extra_info |= {f"{name}_{column}": value for column, value in row.items()}
    benchmark.extra_info |= {
        "nbytes": nbytes,
        "world_size": ranks.world_size,
        "threads_per_rank": 1,
        "calls": calls,
        "ring_over_gloo": medians["ring"] / medians["gloo"],
    }
    info = benchmark.extra_info
    info["row"] = (
        f"all_reduce {nbytes:>9} B, {ranks.world_size} ranks: ring_all_reduce {medians['ring'] * 1e3:7.2f} ms, "
        f"gloo {medians['gloo'] * 1e3:7.2f} ms, ratio {info['ring_over_gloo']:.2f}, "
        f"ring busbw {info['ring_busbw_GBps']:.3f} GB/s"
    )


def pass_by_hand(tensor: torch.Tensor) -> None:
    """The same messages, without a look at the arguments."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.recv(tensor, rank - 1)
    tensor += 1
    dist.send(tensor, (rank + 1) % world_size)
    if not rank:
        dist.recv(tensor, world_size - 1)


def timed_passes(calls: int) -> dict[str, list[float]]:
    """Seconds of every time around on this rank, in turn."""
    ways = {"ours": ring_pass, "plain": pass_by_hand}
    tensor = torch.zeros(1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for call in range(calls + 1):
        for name, way in ways.items():
            tensor.zero_()
            dist.barrier()
            start = time.perf_counter()
            way(tensor)
            if call:
                seconds[name].append(time.perf_counter() - start)
            home = dist.get_world_size() if not dist.get_rank() else dist.get_rank() + 1
            assert tensor.item() == home, "a fast wrong answer does not count"
    return seconds


@pytest.mark.benchmark(group="ring pass")
def test_ring_pass(benchmark: Any, ranks: Ranks, full: bool) -> None:
    rounds: list[list[dict[str, list[float]]]] = []
    benchmark.pedantic(lambda: rounds.append(ranks.run(timed_passes, 100 if full else 30)), rounds=3)
    best = {n: min(slowest_s([rank[n] for rank in everyone]) for everyone in rounds) for n in ("ours", "plain")}
    benchmark.extra_info |= {f"{name}_s": value for name, value in best.items()} | {"world_size": ranks.world_size}
    benchmark.extra_info["row"] = (
        f"4 B around a ring of {ranks.world_size}: ring_pass {best['ours'] * 1e3:.2f} ms, plain send and recv "
        f"{best['plain'] * 1e3:.2f} ms, ratio {best['ours'] / best['plain']:.2f}"
    )
