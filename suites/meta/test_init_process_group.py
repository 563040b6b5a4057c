"""Programs that make their own default group: the first time they are given the one that their rank has."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist


def main(backend="gloo"):
    """As in every script."""
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


@pytest.mark.parametrize("time", range(2))
def test_a_script_runs_as_it_is(world, time):
    assert world.run(main, world_size=2) == [2, 2]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("time", range(2))
def test_the_world_chooses_the_backend(time):
    assert main("nccl") == 2


@pytest.mark.world_size(2)
def test_the_second_time_is_refused():
    dist.init_process_group("gloo")
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo")


@pytest.mark.world_size(2)
def test_a_group_that_was_destroyed_may_be_made_again():
    assert main() == 2
    dist.init_process_group("gloo", init_method="env://")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.world_size(2)
def test_another_size_is_refused():
    with pytest.raises(ValueError, match=r"init_process_group\(world_size=4\) on a rank whose world_size is 2"):
        dist.init_process_group("gloo", rank=dist.get_rank(), world_size=4)
