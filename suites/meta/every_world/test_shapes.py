"""Ranks must give one shape to a collective; only dimensions of one element may be missing on some ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch


def total(*shapes):
    x = torch.ones(shapes[dist.get_rank()])
    dist.all_reduce(x)
    return tuple(x.shape), x.sum().item()


@pytest.mark.parametrize("shapes", [((), (1,)), ((2, 3), (2, 1, 3)), ((1, 1), ()), ((4,), (1, 4))])
def test_dimensions_of_one_element_do_not_count(world, shapes):
    expected = [(shape, 2.0 * torch.Size(shape).numel()) for shape in shapes]
    assert world.run(total, *shapes, world_size=2) == expected


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((6,), (2, 3)), ((1, 2), (1,)), ((), (2,))])
def test_other_shapes_do(world, shapes):
    with pytest.raises(CollectiveMismatch, match="differ in the shape"):
        world.run(total, *shapes, world_size=2)
