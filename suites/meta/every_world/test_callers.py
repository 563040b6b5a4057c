"""Ranks that meet in one helper are distinguished by the lines that called it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock


def send(tensor, peer):
    dist.send(tensor, peer)


def forward(peer):
    send(torch.ones(2), peer)


def backward(peer):
    send(torch.ones(2), peer)


def both_send():
    (backward if dist.get_rank() else forward)(1 - dist.get_rank())


def both_send_forward():
    forward(1 - dist.get_rank())


def total(tensor):
    dist.all_reduce(tensor)


def of_gradients():
    total(torch.ones(3))


def of_losses():
    total(torch.ones(1))


def other_totals():
    (of_losses if dist.get_rank() else of_gradients)()


def line_of(function):
    """Return the line of the function's only statement."""
    return rf"test_callers\.py:{function.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize(
    ("program", "error", "helper", "callers"),
    [
        (both_send, Deadlock, send, (forward, backward)),
        (other_totals, CollectiveMismatch, total, (of_gradients, of_losses)),
    ],
)
def test_the_line_that_called_the_helper_is_told(world, program, error, helper, callers):
    with pytest.raises(error) as told:
        world.run(program, world_size=2)
    for rank, caller in enumerate(callers):
        assert re.search(rf"rank {rank}: .*, at \S*{line_of(helper)}, called at \S*{line_of(caller)}", str(told.value))


def test_one_way_to_a_line_is_told_without_its_caller(world):
    with pytest.raises(Deadlock) as told:
        world.run(both_send_forward, world_size=2)
    assert "called at" not in str(told.value)
