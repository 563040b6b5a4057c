"""Collectives and messages by size: the primitives of this project beside those of torch, call by call in turn.

The columns are those of nccl-tests: ``algbw = nbytes / seconds``, ``busbw`` as in :data:`pdlcheck.bench.BUSBW_FACTORS`,
and ``#wrong`` from one more call on fresh input whose result is known in advance. torch's functions run out of place
and in place, if they support both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives import (
    ring_all_gather,
    ring_all_reduce,
    ring_pass,
    ring_reduce_scatter,
    star_broadcast,
    tree_broadcast,
)

pytestmark = pytest.mark.between_ranks

SIZES = (2**2, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
QUICK = (2**2, 2**16, 2**20, 2**24)  # sizes of all_reduce and messages
ITERATIONS = 20  # for small tensors, as in nccl-tests

# names since torch 2.13, which warns about the old ones
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sizes(quick: Sequence[int]) -> pytest.MarkDecorator:
    """Parametrize by all sizes; those of ``quick`` also run without ``--full``."""
    values = [nbytes if nbytes in quick else pytest.param(nbytes, marks=pytest.mark.full) for nbytes in SIZES]
    return pytest.mark.parametrize("nbytes", values, ids="{}B".format)


@pytest.fixture
def numel(nbytes: int, world_size: int) -> int:
    """Return the number of float32 elements in ``nbytes``, rounded up so that each rank has the same number."""
    return -(-nbytes // 4 // world_size) * world_size


@pytest.mark.benchmark(group="all_reduce")
@sizes(QUICK)
def test_all_reduce(rank_benchmark: Any, device: torch.device, rank: int, world_size: int, numel: int) -> None:
    tensor = torch.zeros(numel, device=device)
    time_collective(
        rank_benchmark,
        "all_reduce",
        {"ring": ring_all_reduce, "torch": dist.all_reduce},
        tensor,
        fill=lambda: tensor.fill_(rank + 1),
        wrong=lambda _: tensor != world_size * (world_size + 1) // 2,
    )


@pytest.mark.benchmark(group="reduce_scatter")
@sizes([2**20])
def test_reduce_scatter(rank_benchmark: Any, device: torch.device, rank: int, world_size: int, numel: int) -> None:
    tensor, part = torch.zeros(numel, device=device), torch.zeros(numel // world_size, device=device)
    own = tensor.view(world_size, -1)[rank]

    def torchs(tensor: Tensor) -> Tensor:
        reduce_scatter_single(part, tensor)
        return part

    def in_place(tensor: Tensor) -> Tensor:
        reduce_scatter_single(own, tensor)
        return own

    time_collective(
        rank_benchmark,
        "reduce_scatter",
        {"ring": ring_reduce_scatter, "torch": torchs, "torch in place": in_place},
        tensor,
        fill=lambda: tensor.fill_(rank + 1),
        wrong=lambda found: found != world_size * (world_size + 1) // 2,
    )


@pytest.mark.benchmark(group="all_gather")
@sizes([2**20])
def test_all_gather(rank_benchmark: Any, device: torch.device, rank: int, world_size: int, numel: int) -> None:
    own, whole = torch.full((numel // world_size,), float(rank), device=device), torch.zeros(numel, device=device)
    part = whole.view(world_size, -1)[rank]

    def fill() -> None:
        whole.fill_(-1)
        part.fill_(rank)

    def torchs(own: Tensor) -> Tensor:
        all_gather_single(whole, own)
        return whole

    def in_place(_: Tensor) -> Tensor:
        all_gather_single(whole, part)
        return whole

    expected = torch.arange(world_size, device=device).repeat_interleave(len(own))
    time_collective(
        rank_benchmark,
        "all_gather",
        {"ring": ring_all_gather, "torch": torchs, "torch in place": in_place},
        own,
        fill=fill,
        wrong=lambda found: found.flatten() != expected,
        nbytes=whole.nbytes,
    )


@pytest.mark.benchmark(group="broadcast")
@sizes([2**20])
def test_broadcast(rank_benchmark: Any, device: torch.device, rank: int, numel: int) -> None:
    tensor = torch.zeros(numel, device=device)
    time_collective(
        rank_benchmark,
        "broadcast",
        {"tree": tree_broadcast, "star": star_broadcast, "torch": lambda tensor: dist.broadcast(tensor, 0)},
        tensor,
        fill=lambda: tensor.fill_(rank + 1),
        wrong=lambda _: tensor != 1,
    )


@pytest.mark.benchmark(group="all_to_all")
@sizes([2**20])
def test_all_to_all(rank_benchmark: Any, device: torch.device, rank: int, world_size: int, numel: int) -> None:
    given, taken = torch.full((numel,), float(rank), device=device), torch.zeros(numel, device=device)
    expected = torch.arange(world_size, device=device).repeat_interleave(numel // world_size)
    time_collective(
        rank_benchmark,
        "all_to_all",
        {"torch": lambda given: dist.all_to_all_single(taken, given)},
        given,
        fill=lambda: taken.fill_(-1),
        wrong=lambda _: taken != expected,
    )


@pytest.mark.benchmark(group="send and receive")
@sizes(QUICK)
def test_ping_pong(rank_benchmark: Any, device: torch.device, rank: int, world_size: int, numel: int) -> None:
    """Time a message from the first rank to the last and back: twice the bytes of the message."""
    tensor, last = torch.zeros(numel, device=device), world_size - 1

    def there_and_back(tensor: Tensor) -> None:
        if rank == 0:
            dist.send(tensor, last)
            dist.recv(tensor, last)
        elif rank == last:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)

    rank_benchmark(
        there_and_back,
        tensor,
        nbytes=2 * tensor.nbytes,
        operation="send_recv",
        setup=lambda: tensor.fill_(rank),
        check=lambda _: int(tensor.count_nonzero()) if rank in (0, last) else 0,
        iterations=iterations_for(tensor),
    )


@pytest.mark.benchmark(group="ring pass")
def test_ring_pass(rank_benchmark: Any, device: torch.device, rank: int, world_size: int) -> None:
    """Time 4 B around the ring; each rank adds one."""

    def by_hand(tensor: Tensor) -> None:
        """Send the same messages without a check of the arguments."""
        if rank:
            dist.recv(tensor, rank - 1)
        tensor += 1
        dist.send(tensor, (rank + 1) % world_size)
        if not rank:
            dist.recv(tensor, world_size - 1)

    tensor = torch.zeros(1, device=device)
    rank_benchmark(ring_pass, tensor, against={"plain": by_hand})


def time_collective(
    rank_benchmark: Any,
    operation: str,
    ways: Mapping[str, Callable[[Tensor], Any]],
    tensor: Tensor,
    *,
    fill: Callable[[], object],
    wrong: Callable[[Any], Tensor],
    nbytes: int | None = None,
) -> None:
    """Time the first way beside the others.

    Args:
        rank_benchmark: the fixture.
        operation: name of the operation, for the bus bandwidth.
        ways: functions of ``tensor``.
        tensor: the argument of every way.
        fill: prepares the input of each sample.
        wrong: takes the result of one call on such input, and marks the wrong elements.
        nbytes: size of the whole operation; default: that of ``tensor``.
    """
    (_, ours), *others = ways.items()
    rank_benchmark(
        ours,
        tensor,
        nbytes=nbytes or tensor.nbytes,
        operation=operation,
        against=dict(others),
        setup=fill,
        check=lambda found: int(wrong(found).count_nonzero()),
        iterations=iterations_for(tensor),
    )


def iterations_for(tensor: Tensor) -> int | None:
    """Return how often one sample runs a small tensor; None for a large one."""
    return ITERATIONS if tensor.nbytes <= 2**16 else None
