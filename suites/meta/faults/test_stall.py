"""A stalled rank on the simulated cluster: survivors wait until their time limit elapses, which takes no real time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Inconclusive, RankStalled
from pdlcheck.faults import Stall
from pdlcheck.worlds import get_world


def reduce_three_times():
    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def caught(fn, *args):
    """Return the text of the RuntimeError that ``fn`` raises, empty if it raises none."""
    try:
        fn(*args)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:2"])
def test_a_stalled_rank_is_the_cause_and_its_peers_give_up_waiting(schedule):
    world = get_world("sim", schedule=schedule, faults=[Stall(rank=1, operation=2)])
    with pytest.raises(RankStalled, match=r"rank 1 was stalled by a fault .* collective 2.* never went on") as failure:
        world.run(reduce_three_times, world_size=3)
    assert failure.value.rank == 1
    assert "all_reduce(SUM)" in failure.value.operation
    story = "\n".join(failure.value.__notes__)
    assert "ranks 0, 2 gave up waiting, as rank 1 failed: [sim] Timed out waiting 1800000ms for recv" in story
    assert "faults=[Stall(rank=1, operation=2)]" in story


def go_on_in_another_group():
    pair = dist.new_group([0, 2])
    told = caught(reduce_three_times)
    again = caught(dist.all_reduce, torch.ones(1))
    x = torch.ones(1)
    dist.all_reduce(x, group=pair)
    return told, again, x.item()


def test_survivors_go_on_where_the_stalled_rank_is_no_member_and_have_lost_the_group_where_it_is():
    zero, stalled, two = get_world("sim", faults=[Stall(1, 2)]).run(go_on_in_another_group, world_size=3)
    assert isinstance(stalled, RankStalled)
    for told, again, total in (zero, two):
        assert "Timed out waiting" in told
        assert "Application timeout caused pair closure" in again
        assert total == 2.0


def test_a_survivors_own_failure_counts_more_than_the_stall():
    def judge():
        told = caught(reduce_three_times)
        assert told.startswith("Connection closed"), f"got {told}"

    with pytest.raises(AssertionError, match=r"got \[sim\] Timed out"):
        get_world("sim", faults=[Stall(1, 2)]).run(judge, world_size=3)


def relay():
    """Send from rank 2 to 3 and back; rank 1 should send to 0."""
    rank, x = dist.get_rank(), torch.full((1,), float(dist.get_rank()))
    if rank == 1:
        dist.send(x, 0)
    elif rank == 0:
        return caught(dist.recv, x, 1)
    elif rank == 2:
        dist.send(x, 3)
        dist.recv(x, 3)
    else:
        dist.recv(x, 2)
        dist.send(x, 2)
    return x.item()


@pytest.mark.parametrize("schedule", ["first", "random:1", "pct:1"])
def test_ranks_that_do_not_need_the_stalled_one_finish(schedule):
    told, stalled, two, three = get_world("sim", schedule=schedule, faults=[Stall(1, 0)]).run(relay, world_size=4)
    assert told == "[sim] Timed out waiting 1800000ms for recv operation to complete"
    assert isinstance(stalled, RankStalled)
    assert (two, three) == (2.0, 2.0)


def chain():
    """Receive on rank r from r + 1; the last rank sends."""
    rank, x = dist.get_rank(), torch.zeros(1)
    if rank < dist.get_world_size() - 1:
        told = caught(dist.recv, x, rank + 1)
        if told:
            return told
    if rank > 0:
        dist.send(x, rank - 1)
    return ""


@pytest.mark.parametrize("schedule", ["first", "random:1", "random:3"])
def test_who_waits_for_one_that_gave_up_loses_the_connection(schedule):
    zero, one, _ = get_world("sim", schedule=schedule, faults=[Stall(2, 0)]).run(chain, world_size=3)
    assert "Timed out waiting" in one
    assert "Connection closed by peer [rank 1]" in zero


def test_a_send_that_is_buffered_does_not_need_its_receiver():
    def send():
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
            return "sent"
        return dist.recv(torch.ones(1), 0)

    sent, _ = get_world("sim", semantics="buffered", faults=[Stall(1, 0)]).run(send, world_size=2)
    assert sent == "sent"
    with pytest.raises(RankStalled) as failure:
        get_world("sim", faults=[Stall(1, 0)]).run(send, world_size=2)
    assert "Timed out waiting 1800000ms for send" in "\n".join(failure.value.__notes__)


def test_a_buffered_send_is_done_also_when_the_sender_gives_up_on_its_receiver():
    def program():
        rank = dist.get_rank()
        work = dist.isend(torch.ones(1), 1 - rank)
        told = caught(dist.recv, torch.ones(1), 1 - rank)
        return told, caught(work.wait)

    (told, later), _ = get_world("sim", semantics="buffered", faults=[Stall(1, 0)]).run(program, world_size=2)
    assert "Timed out waiting" in told
    assert later == ""


def test_a_time_limit_elapses_in_one_group_after_the_other():
    def program():
        both = dist.new_group([0, 1])
        return [caught(dist.all_reduce, torch.ones(1), dist.ReduceOp.SUM, group) for group in (None, both)]

    told, _ = get_world("sim", faults=[Stall(1, 1)]).run(program, world_size=2)
    assert ["Timed out waiting" in one for one in told] == [True, True]


def test_ranks_that_deadlock_beside_a_stalled_one_end():
    def program():
        if dist.get_rank() == 2:
            dist.all_reduce(torch.ones(1))
        else:
            dist.recv(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(RankStalled):
        get_world("sim", faults=[Stall(2, 0)]).run(program, world_size=3)


def test_a_stall_that_does_not_come_about_is_no_pass():
    with pytest.raises(Inconclusive, match=r"Stall\(rank=1, operation=3\) did not come about"):
        get_world("sim", faults=[Stall(1, 3)]).run(reduce_three_times, world_size=2)


def test_a_stalled_rank_unwinds_and_communicates_no_more():
    events = []

    def program():
        try:
            reduce_three_times()
        except Exception:
            events.append("caught")
        finally:
            if dist.get_rank() == 1:
                events.append("unwound")
                dist.all_reduce(torch.ones(1))
                events.append("went on")

    get_world("sim", faults=[Stall(1, 1)]).run(program, world_size=2)
    assert sorted(events) == ["caught", "unwound"]
