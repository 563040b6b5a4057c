"""``monitored_barrier`` on the simulated cluster: after the loss of a rank, survivors get torch's errors on gloo."""

from __future__ import annotations

import re
from contextlib import closing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock, RankDied, RankStalled
from pdlcheck.faults import Kill, Stall
from pdlcheck.worlds import get_world

REACHED = (
    "Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
    "Please check rank 0 logs for faulty rank.\n Original exception: \n"
)
CLOSED = "[sim] Connection closed by peer [rank {}]. This is typically caused by a remote worker crashing."
TIMED_OUT = "[sim] Timed out waiting {}ms for {} operation to complete"


class InOrder:
    """A schedule that runs the first named ranks while they can run."""

    every_step = False
    every_post = False

    def __init__(self, *order):
        self._order = order

    def begin(self, world_size):
        pass

    def choose(self, point):
        return min(point.runnable, key=self._order.index)


def meet(group=None, **how):
    try:
        dist.monitored_barrier(group, **how)
    except RuntimeError as error:
        return str(error)
    return "passed"


def told(*faults, world_size=3, schedule="first", **how):
    return get_world("sim", schedule=schedule, faults=faults).run(meet, world_size=world_size, **how)


ONE_SECOND = {"timeout": timedelta(seconds=1)}


def test_without_a_fault_all_pass():
    assert told(**ONE_SECOND) == told() == told(wait_all_ranks=True) == ["passed"] * 3


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:2"])
@pytest.mark.parametrize(("how", "limit"), [({}, 1800000), (ONE_SECOND, 1000), ({"timeout": 2.5}, 2500)])
def test_a_stalled_rank_is_named_by_rank_0(schedule, how, limit):
    zero, stalled, two = told(Stall(1, 0), schedule=schedule, **how)
    assert isinstance(stalled, RankStalled)
    head = f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in {limit} ms\n Original exception: \n"
    assert zero == head + TIMED_OUT.format(limit, "recv")
    assert two == REACHED.format(2) + CLOSED.format(0)


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:2"])
def test_all_stalled_ranks_are_named_if_rank_0_waits_for_all(schedule):
    zero, *_, three = told(Stall(1, 0), Stall(2, 0), world_size=4, schedule=schedule, wait_all_ranks=True, **ONE_SECOND)
    assert zero == "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms"
    assert three == REACHED.format(3) + CLOSED.format(0)
    zero, *_ = told(Stall(1, 0), Stall(2, 0), world_size=4, schedule=schedule, **ONE_SECOND)
    assert zero.startswith("[Rank 0]: Rank 1 failed")


def test_ranks_that_wait_for_a_stalled_rank_0_keep_the_time_limit_of_the_group():
    _, one, two = told(Stall(0, 0), **ONE_SECOND)
    assert one == REACHED.format(1) + TIMED_OUT.format(1800000, "send")
    assert two == REACHED.format(2) + TIMED_OUT.format(1800000, "send")


def test_a_rank_that_is_killed_while_the_others_wait():
    zero, _, two = told(Kill(1, 0), schedule=InOrder(0, 2, 1), **ONE_SECOND)
    head = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms\n Original exception: \n"
    assert zero == head + CLOSED.format(1)
    assert two == REACHED.format(2) + CLOSED.format(0)
    _, one, two = told(Kill(0, 0), schedule=InOrder(2, 1, 0))
    assert one == REACHED.format(1) + CLOSED.format(0)
    assert two == REACHED.format(2) + CLOSED.format(0)


def test_who_comes_after_the_death_of_one_that_it_talks_to_sees_a_closed_connection():
    zero, _, two = told(Kill(1, 0), schedule=InOrder(1, 0, 2))
    assert zero == CLOSED.format(1)
    assert two == REACHED.format(2) + CLOSED.format(0)  # it communicates with rank 0 only
    _, one, two = told(Kill(0, 0), schedule=InOrder(0, 1, 2))
    assert one == two == CLOSED.format(0)


@pytest.mark.parametrize("schedule", ["first", "random:1", InOrder(1, 0, 2), InOrder(2, 0, 1)])
def test_the_others_wait_on_if_rank_0_goes_on_to_something_else(schedule):
    def program(goes_on):
        told = meet()
        if goes_on and dist.get_rank() == 0:
            dist.recv(torch.ones(1), 2)
        if goes_on and dist.get_rank() == 2:
            dist.send(torch.ones(1), 0)
        return told

    world = get_world("sim", schedule=schedule, faults=[Kill(1, 0)])
    assert world.run(program, True, world_size=3)[2] == REACHED.format(2) + TIMED_OUT.format(1800000, "recv")
    assert world.run(program, False, world_size=3)[2] == REACHED.format(2) + CLOSED.format(0)


def test_ranks_are_counted_in_the_group():
    def program():
        group = dist.new_group([1, 2, 3])
        return meet(group=group, **ONE_SECOND) if dist.get_rank() else None

    _, one, _, three = get_world("sim", faults=[Stall(2, 1)]).run(program, world_size=4)
    assert one.startswith("[Rank 0]: Rank 1 failed")
    assert three == REACHED.format(2) + CLOSED.format(1)


@pytest.mark.parametrize("how", [{}, {"wait_all_ranks": True}])
@pytest.mark.parametrize(("fault", "error"), [(Kill(1, 1), RankDied), (Stall(1, 1), RankStalled)])
def test_survivors_that_die_of_it_are_no_cause(fault, error, how):
    def program():
        dist.all_reduce(torch.ones(1))
        dist.monitored_barrier(**how)

    for schedule in ("first", "random:1", "random:2"):
        with pytest.raises(error) as failure:
            get_world("sim", schedule=schedule, faults=[fault]).run(program, world_size=3)
        lost = r"rank 0 .* as rank 1 failed: (\[Rank 0\]: Ranks? 1 failed to pass|\[sim\] Connection closed)"
        assert re.search(lost, "\n".join(failure.value.__notes__))


def test_a_rank_that_is_well_and_does_not_come_is_a_deadlock_as_before():
    def program():
        pair = dist.new_group([0, 1])
        if dist.get_rank() == 1:
            dist.monitored_barrier(pair)
        elif dist.get_rank() == 2:
            dist.recv(torch.ones(1), 1)

    with pytest.raises(Deadlock, match="barrier"):
        get_world("sim").run(program, world_size=3)
    with pytest.raises(RankStalled) as failure:  # rank 2 takes no part in the barrier
        get_world("sim", faults=[Stall(2, 1)]).run(program, world_size=3)
    assert "rank 1 was stopped in monitored_barrier" in "\n".join(failure.value.__notes__)


@pytest.mark.parametrize("schedule", ["first", "random:1", InOrder(1, 0, 2), InOrder(2, 1, 0)])
def test_a_rank_that_does_not_come_in_time_is_named_as_on_gloo(schedule):
    def program(how):
        if dist.get_rank() != 1:
            return meet(**ONE_SECOND, **how)
        return None

    world = get_world("sim", schedule=schedule)
    zero, _, two = world.run(program, {}, world_size=3)
    head = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms\n Original exception: \n"
    assert zero == head + TIMED_OUT.format(1000, "recv")
    assert two == REACHED.format(2) + CLOSED.format(0)
    zero, _, two = world.run(program, {"wait_all_ranks": True}, world_size=3)
    assert zero == "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms"


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_a_time_limit_of_nothing_is_over_at_once(world):
    def program():
        group = dist.new_group()
        if dist.get_rank() == 0:
            error = r"Rank 1 failed to pass .* in 0 ms\n Original exception: \nRank 0 timed out"
            with pytest.raises(RuntimeError, match=error):
                group.monitored_barrier(timedelta(0))

    with closing(get_world(world)) as ranks:
        ranks.run(program, world_size=3)


def test_nor_is_one_late_who_waits_for_nobody():
    get_world("sim").run(lambda: dist.monitored_barrier(timeout=timedelta(0)), world_size=1)


def test_rank_0_that_does_not_come_is_a_deadlock_as_nobody_else_has_a_limit():
    def program():
        if dist.get_rank():
            dist.monitored_barrier(**ONE_SECOND)

    with pytest.raises(Deadlock, match="rank 1: blocked in monitored_barrier"):
        get_world("sim").run(program, world_size=2)


def test_it_does_not_meet_a_barrier():
    def program():
        dist.monitored_barrier() if dist.get_rank() else dist.barrier()

    with pytest.raises(CollectiveMismatch, match=r"barrier and monitored_barrier|monitored_barrier and barrier"):
        get_world("sim").run(program, world_size=2)
