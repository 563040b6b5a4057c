"""Verdicts on hundreds of ranks take seconds, within a limit that a quadratic scan of ranks would break."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world

RANKS = 500
LIMIT_S = 60.0


@pytest.fixture
def world():
    with contextlib.closing(get_world("sim", timeout_s=LIMIT_S)) as opened:
        yield opened


def differs_in_shape():
    dist.all_reduce(torch.ones(2 if dist.get_rank() == RANKS // 2 else 1))


def one_does_not_come():
    if dist.get_rank() != 5:
        dist.all_reduce(torch.ones(1))


def raises():
    if dist.get_rank() == 5:
        raise ValueError("of rank 5")
    dist.barrier()


def waits_in_a_ring():
    dist.recv(torch.ones(1), (dist.get_rank() - 1) % RANKS)


@pytest.mark.parametrize(
    ("fn", "error", "words"),
    [
        (differs_in_shape, CollectiveMismatch, r"rank 250 and ranks 0-249, 251-499 met in collective 0"),
        (one_does_not_come, Deadlock, r"no rank can go on: 499 of 500 are blocked\n  ranks 0-4, 6-499: blocked in all"),
        (raises, ValueError, "of rank 5"),
        (waits_in_a_ring, Deadlock, r"no rank can go on: 500 of 500 are blocked"),
    ],
)
def test_a_fault_among_many_ranks_is_named(world, fn, error, words):
    with pytest.raises(error, match=words):
        world.run(fn, world_size=RANKS)


def test_many_ranks_agree(world):
    def total():
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert world.run(total, world_size=RANKS) == [RANKS] * RANKS
