"""Callbacks of futures that communicate: they are what the rank does meanwhile, and a verdict in them stays one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world
from pdlcheck.worlds.semantics import PROFILES

SCHEDULES = ["first", *(f"random:{seed}" for seed in range(6))]


def reduced(x):
    return dist.all_reduce(x, async_op=True).get_future()


def in_a_chain():
    """Each reduction begins in the callback of the one before."""
    x, y, z = torch.ones(2), torch.ones(3), torch.ones(4)
    future = reduced(x).then(lambda _: reduced(y).wait()).then(lambda _: reduced(z).wait())
    future.wait()
    return [t.tolist() for t in (x, y, z)]


def with_a_message_between(ends):
    """The callback waits for a message that rank 1 may not send."""
    x, y = torch.ones(2), torch.zeros(1)

    def exchange(_):
        if dist.get_rank() == 0:
            dist.recv(y, 1)
        elif ends:
            dist.send(torch.ones(1), 0)

    reduced(x).then(exchange).wait()
    return y.item()


def two_chains(in_order):
    """As torch's PowerSGD does with two buckets: the second reductions go out when the first come back."""
    tensors = [torch.full((2,), float(i)) for i in range(4)]
    futures = []
    for a, b in (tensors[:2], tensors[2:]):
        future = reduced(a).then(lambda _, b=b: reduced(b).wait())
        if in_order:
            future.wait()
        futures.append(future)
    for future in futures:
        future.wait()
    return [t.tolist() for t in tensors]


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_callback_may_wait_for_other_ranks(schedule, profile):
    world = get_world("sim", schedule=schedule, semantics=profile)
    assert world.run(in_a_chain, world_size=3) == [[[3.0] * 2, [3.0] * 3, [3.0] * 4]] * 3
    assert world.run(with_a_message_between, True, world_size=2) == [1.0, 0.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_deadlock_in_a_callback_is_told_as_one(schedule):
    with pytest.raises(Deadlock, match=r"rank 0: blocked in recv from rank 1 .*test_callbacks\.py:\d+.*\n.*rank 1"):
        get_world("sim", schedule=schedule).run(with_a_message_between, False, world_size=2)


def test_chains_that_interleave_are_found_and_those_in_order_are_not():
    found = [_verdict(schedule, False) for schedule in SCHEDULES]
    assert CollectiveMismatch in found or Deadlock in found
    assert {_verdict(schedule, True) for schedule in SCHEDULES} == {None}


def _verdict(schedule, in_order):
    try:
        told = get_world("sim", schedule=schedule).run(two_chains, in_order, world_size=2)
    except (CollectiveMismatch, Deadlock) as error:
        return type(error)
    assert told == [[[0.0] * 2, [2.0] * 2, [4.0] * 2, [6.0] * 2]] * 2
    return None
