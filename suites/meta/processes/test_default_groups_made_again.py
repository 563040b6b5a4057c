"""Default groups that a program makes one after the other: torch gives all of them one name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.worlds import get_world


@pytest.fixture(scope="module")
def gloo():
    world = get_world("gloo")
    yield world
    world.close()


def made_again(times):
    """Return the keys by which the ranks of each group meet; each group does the same operations."""
    keys = [dist.group.WORLD._key]
    for number in range(times):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        keys.append(dist.group.WORLD._key)
        dist.all_reduce(torch.ones(number + 1))
    return keys


def made_alone_before(folder):
    """Make one group more on rank 0 than on rank 1 before both make one."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/alone", rank=0, world_size=1)
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/both", rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.group.WORLD._key, total.item()


def test_operations_of_one_group_are_not_taken_for_those_of_another(gloo):
    one, other = gloo.run(made_again, 3, world_size=2)
    assert one == other
    assert len(set(one)) == 4, "collective 0 of a group would meet collective 0 of the one before"


def test_ranks_that_have_made_different_numbers_of_groups_meet(gloo, tmp_path):
    (key, total), other = gloo.run(made_alone_before, str(tmp_path), world_size=2)
    assert (key, total) == other
    assert total == 2
