"""The first operation of a turn needs no separate choice: schedules without one there reach the same ends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import PdlcheckError
from pdlcheck.faults import Kill
from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.schedules.exhaustive import Exhaustive


class OncePerTurn(Exhaustive):
    """All schedules that make no choice before the first operation of a turn."""

    every_post = False


def two_messages_of_one_rank_and_one_of_another():
    """Send an asynchronous message, and then do another operation in the same turn."""
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([float(i)]), 2) for i in (1, 2)]
        for work in works:
            work.wait()
    elif dist.get_rank() == 1:
        dist.send(torch.tensor([3.0]), 2)
    return _in_the_order_they_come(3) if dist.get_rank() == 2 else None


def a_key_and_then_a_message():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("key", "value")
        dist.send(torch.tensor([1.0]), 2)
    elif dist.get_rank() == 1:
        known = store.check(["key"])
        dist.send(torch.tensor([2.0 + known]), 2)
    return _in_the_order_they_come(2) if dist.get_rank() == 2 else None


def a_question_and_then_a_message():
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(1), 1)
        known = work.is_completed()
        dist.send(torch.tensor([1.0 + known]), 2)
        work.wait()
    elif dist.get_rank() == 1:
        dist.send(torch.tensor([5.0]), 0)
    return _in_the_order_they_come(1) if dist.get_rank() == 2 else None


def messages_between_two_losses():
    """Send between two losses: rank 0 is killed at its second operation, before or after rank 1 was served."""
    if dist.get_rank() == 0:
        dist.isend(torch.tensor([1.0]), 2)
        dist.barrier()
    elif dist.get_rank() == 1:
        dist.send(torch.tensor([2.0]), 2)
    return _in_the_order_they_come(2) if dist.get_rank() == 2 else None


def _in_the_order_they_come(count):
    taken = []
    for _ in range(count):
        message = torch.empty(1)
        try:
            dist.recv(message)
        except RuntimeError:
            return [*taken, "lost"]
        taken.append(message.item())
    return taken


def ends_of(search, program, faults=()):
    """Return all values that rank 2 can have in the end."""
    ends = set()
    while search.advance():
        try:
            ends.add(str(get_world("sim", schedule=search, faults=faults).run(program, world_size=3)[2]))
        except (PdlcheckError, RuntimeError) as error:
            ends.add(type(error).__name__)
    return ends


@pytest.mark.parametrize(
    ("program", "faults"),
    [
        (two_messages_of_one_rank_and_one_of_another, ()),
        (a_key_and_then_a_message, ()),
        (a_question_and_then_a_message, ()),
        (messages_between_two_losses, (Kill(0, 1),)),
    ],
)
def test_a_choice_for_each_turn_reaches_the_ends_of_a_choice_for_each_operation(program, faults):
    ends = ends_of(Exhaustive(), program, faults)
    assert len(ends) > 1
    assert ends_of(OncePerTurn(reduction=False), program, faults) == ends
