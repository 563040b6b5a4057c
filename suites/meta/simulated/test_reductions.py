"""Results of simulated reductions where a backend's result is undefined or depends on the order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import Semantics

NAN = float("nan")


def reduced(dtype):
    x = torch.full((3,), dist.get_rank() + 1).to(dtype)
    dist.reduce(x, 1)
    return str(x[0].item())


@pytest.mark.parametrize(
    ("semantics", "dtype", "elsewhere"),
    [
        ("rendezvous", torch.float32, ["nan", "nan"]),
        ("gloo", torch.float32, ["nan", "nan"]),
        ("rendezvous", torch.int64, [str(-(2**63))] * 2),
        ("nccl", torch.float32, ["1.0", "3.0"]),
        (Semantics(poison=False), torch.float32, ["1.0", "3.0"]),
    ],
)
def test_what_a_reduce_leaves_on_other_ranks_than_its_destination_is_of_no_use(semantics, dtype, elsewhere):
    first, destination, last = get_world("sim", semantics=semantics).run(reduced, dtype, world_size=3)
    assert [first, last] == elsewhere
    assert float(destination) == 6


def greatest(mine):
    x = torch.tensor([mine[dist.get_rank()]])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return str(x.item())


@pytest.mark.parametrize(
    ("mine", "order", "found"),
    [((NAN, 2.0), "rank_order", "nan"), ((2.0, NAN), "rank_order", "2.0"), ((2.0, NAN), "reversed", "nan")],
)
def test_a_nan_is_the_maximum_where_it_comes_first(mine, order, found):
    world = get_world("sim", semantics=Semantics(reduce=order))
    assert world.run(greatest, mine, world_size=2) == [found] * 2
