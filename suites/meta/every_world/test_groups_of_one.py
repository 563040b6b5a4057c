"""Each rank makes a group of itself in one call: backends do not communicate there, so it is correct."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import get_world


def of_itself():
    rank = dist.get_rank()
    first, second = dist.new_group([rank]), dist.new_group([rank])
    x = torch.ones(1) * rank
    dist.all_reduce(x, group=first)
    dist.broadcast(x, rank, group=second)
    dist.destroy_process_group(first)
    dist.barrier(second)
    dist.all_reduce(x, group=dist.new_group([0, 1, 2]))
    return x.item(), dist.get_process_group_ranks(second)


def of_another():
    dist.new_group([(dist.get_rank() + 1) % 3])


def of_another_on_one_rank():
    dist.new_group([min(dist.get_rank(), 1)])


def of_itself_on_one_rank():
    dist.new_group([2] if dist.get_rank() == 2 else [0, 1])


@pytest.fixture(scope="module", params=["sim", "gloo"])
def world(request):
    world = get_world(request.param)
    yield world
    world.close()


def test_each_rank_may_make_a_group_of_itself(world):
    assert world.run(of_itself, world_size=3) == [(3.0, [rank]) for rank in range(3)]


@pytest.mark.parametrize("program", [of_another, of_another_on_one_rank, of_itself_on_one_rank])
def test_groups_that_differ_in_another_way_are_refused(world, program):
    with pytest.raises(CollectiveMismatch, match="make different groups"):
        world.run(program, world_size=3)


@pytest.mark.parametrize("program", [of_another, of_another_on_one_rank, of_itself_on_one_rank])
@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_first(program, seed):
    with pytest.raises(CollectiveMismatch, match="make different groups"):
        get_world("sim", seed=seed).run(program, world_size=3)
