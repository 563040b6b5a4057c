"""A rank that never joins: no rank gets a default group, and survivors see torch's error at the rendezvous."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.errors import Inconclusive, RankDied
from pdlcheck.faults import Absent, Kill
from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated import SimulatedWorld


def meet(**timeout):
    dist.init_process_group("gloo", **timeout)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def go_alone(**timeout):
    """Continue alone if the other ranks do not join."""
    try:
        return meet(**timeout)
    except dist.DistError as error:
        assert not dist.is_initialized()
        return type(error), str(error)


CLIENTS = "Timed out after {} seconds waiting for clients. {} clients joined."
KEYS = "wait timeout after {}ms, keys: /default_pg/0//cpu//0/0"
CONNECT = "The client socket has timed out after {}ms while trying to connect to (127.0.0.1, 29500)."


@pytest.mark.parametrize(
    ("absent", "world_size", "timeout", "told"),
    [
        ({2}, 3, {}, {0: CLIENTS.format(1801, "2/3"), 1: KEYS.format(1800000)}),
        ({1}, 3, {"timeout": timedelta(seconds=2.5)}, {0: CLIENTS.format(3, "2/3"), 2: KEYS.format(2500)}),
        ({1, 2}, 4, {"timeout": timedelta(seconds=3)}, {0: CLIENTS.format(4, "2/4"), 3: KEYS.format(3000)}),
        ({0}, 3, {"timeout": timedelta(seconds=3)}, dict.fromkeys((1, 2), CONNECT.format(3000))),
    ],
)
def test_survivors_get_what_torch_raises(monkeypatch, absent, world_size, timeout, told):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    faults = [Absent(rank) for rank in sorted(absent)]
    ended = get_world("sim", faults=faults).run(go_alone, world_size=world_size, **timeout)
    kind = dist.DistNetworkError if 0 in absent else dist.DistStoreError
    for rank, outcome in enumerate(ended):
        if rank in absent:
            assert isinstance(outcome, RankDied)
            assert str(outcome) == f"rank {rank} never came to init_process_group: a fault dropped it"
        else:
            assert outcome == (kind, told[rank])
    assert get_world("sim").run(go_alone, world_size=2) == [2.0, 2.0]


def test_a_program_that_does_not_expect_it_fails_and_the_report_names_the_absent_rank():
    with pytest.raises(RankDied, match="rank 1 never came") as failure:
        get_world("sim", faults=[Absent(1)]).run(meet, world_size=3)
    story = "\n".join(failure.value.__notes__)
    assert "rank 0 gave up waiting, as rank 1 failed: Timed out after 1801 seconds waiting for clients" in story
    assert "rank 2 gave up waiting, as rank 1 failed: wait timeout after 1800000ms" in story
    assert "faults=[Absent(rank=1)]" in story


def train():
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    return model(torch.ones(1, 1)).item()


FIRST_USES = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "barrier": dist.barrier,
    "ddp": train,
    "get_rank": dist.get_rank,
    "new_group": lambda: dist.new_group([0, 1]),
    "send": lambda: dist.send(torch.ones(1), 1),
}


@pytest.mark.parametrize("use", FIRST_USES.values(), ids=FIRST_USES)
def test_a_program_that_was_given_its_group_is_told_at_the_first_use(use):
    def program():
        assert not dist.is_initialized()
        with pytest.raises(dist.DistStoreError, match=r"no default group, as the world has the fault Absent\(rank=2\)"):
            use()

    get_world("sim", faults=[Absent(2)]).run(program, world_size=3)


def test_ranks_that_stay_lose_the_group_and_get_it_back():
    world, groups = get_world("sim"), {}

    def keep():
        groups[os.environ["RANK"]] = dist.new_group([0, 1, 2])
        return meet()

    def use_what_was_kept():
        x = torch.ones(1)
        with pytest.raises(dist.DistError, match="Absent"):
            dist.all_reduce(x, group=groups[os.environ["RANK"]])
        return x.item()

    with world.open(3) as ranks:
        assert ranks.run(keep) == [3.0] * 3
        for absent, program in ((1, go_alone), (0, go_alone), (1, use_what_was_kept)):
            world.faults = [Absent(absent)]
            assert isinstance(ranks.run(program)[absent], RankDied)
        with pytest.raises(RankDied):
            ranks.run(meet)
        world.faults = [Kill(1, 0)]
        with pytest.raises(RankDied, match="killed"):
            ranks.run(meet)
        world.faults = ()
        assert ranks.run(meet) == [3.0] * 3


def test_a_survivors_own_failure_counts_more():
    def program():
        assert go_alone() == 3.0

    with pytest.raises(AssertionError, match="waiting for clients"):
        get_world("sim", faults=[Absent(1)]).run(program, world_size=2)


@pytest.mark.parametrize("schedule", ["first", "random:1", "replay:0r2"])
def test_it_is_the_same_under_every_schedule(schedule):
    world = get_world("sim", schedule=schedule, faults=[Absent(2)])
    assert [type(outcome) for outcome in world.run(go_alone, world_size=3)] == [tuple, tuple, RankDied]
    again = eval(repr(world), {"SimulatedWorld": SimulatedWorld, "Absent": Absent})
    assert str(again.run(go_alone, world_size=3)) == str(world.run(go_alone, world_size=3))


@pytest.mark.parametrize(("program", "world_size"), [(lambda: None, 3), (meet, 1)])
def test_nobody_who_asks_for_a_group_is_no_pass(program, world_size):
    with pytest.raises(Inconclusive, match=r"Absent\(rank=0\) did not come about: no other rank asks for a .* group"):
        get_world("sim", faults=[Absent(0)]).run(program, world_size=world_size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Absent(-1), "Absent: rank is counted from 0, got -1"),
        (lambda: get_world("sim", faults=[Absent(2)]).run(meet, world_size=2), "about rank 2 of 2; name a rank"),
    ],
)
def test_ranks_that_cannot_be_meant_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
