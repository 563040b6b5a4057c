"""Killed ranks on the simulated cluster: survivors see gloo's behaviour, and the report names the fault."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Inconclusive, RankDied
from pdlcheck.faults import Kill
from pdlcheck.worlds import get_world


def reduce_three_times():
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def go_on_without(lost):
    """Reduce on all ranks; if that fails, the survivors exchange a message."""
    rank = dist.get_rank()
    try:
        reduce_three_times()
    except RuntimeError as error:
        assert f"Connection closed by peer [rank {lost}]" in str(error)  # noqa: PT017 - without an error, return None
        x = torch.tensor([float(rank)])
        dist.send(x, 2) if rank == 0 else dist.recv(x, 0)
        return x.item()
    return None


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:2"])
def test_a_killed_rank_is_the_cause_and_its_peers_lose_the_connection(schedule):
    world = get_world("sim", schedule=schedule, faults=[Kill(rank=1, operation=2)])
    with pytest.raises(RankDied, match=r"rank 1 was killed by a fault .* all_reduce\(SUM\) .* collective 2") as caught:
        world.run(reduce_three_times, world_size=3)
    assert caught.value.rank == 1
    story = "\n".join(caught.value.__notes__)
    assert "ranks 0, 2 lost the connection, as rank 1 failed: [sim] Connection closed by peer [rank 1]" in story
    assert "faults=[Kill(rank=1, operation=2)]" in story
    get_world("sim", schedule=schedule).run(reduce_three_times, world_size=3)


def test_survivors_that_handle_the_loss_return_and_can_still_talk():
    zero, died, two = get_world("sim", faults=[Kill(1, 2)]).run(go_on_without, 1, world_size=3)
    assert (zero, two) == (0.0, 0.0)
    assert isinstance(died, RankDied)


def test_a_survivors_own_failure_counts_more_than_the_fault():
    with pytest.raises(AssertionError, match="Connection closed"):
        get_world("sim", faults=[Kill(1, 2)]).run(go_on_without, 0, world_size=3)


def test_a_fault_that_does_not_come_about_is_no_pass():
    with pytest.raises(Inconclusive, match=r"Kill\(rank=1, operation=3\) did not come about: .* fewer .*: 3, numbered"):
        get_world("sim", faults=[Kill(1, 3)]).run(reduce_three_times, world_size=2)
    with pytest.raises(Inconclusive, match=r"Kill\(rank=1, operation=0\) did not come about: .* fewer .*: none\n"):
        get_world("sim", faults=[Kill(1, 0)]).run(dist.get_rank, world_size=2)
