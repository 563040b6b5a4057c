"""Operations that lose a rank, killed or stalled: the results of handles and futures, and unaffected operations."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.errors import CollectiveMismatch, Deadlock, Inconclusive, RankDied, RankStalled
from pdlcheck.faults import Kill, Stall
from pdlcheck.worlds import get_world


def caught(fn, *args):
    """Return the text of the RuntimeError that ``fn`` raises, empty if it raises none."""
    try:
        fn(*args)
    except RuntimeError as error:
        return str(error)
    return ""


LOSSES = [(Stall(1, 0), "Timed out waiting"), (Kill(1, 0), "Connection closed")]


def wait_later(how):
    x = torch.ones(1)
    work = dist.all_reduce(x, async_op=True)
    if how == "poll":
        while not work.is_completed():
            pass
    return caught(work.get_future().wait if how == "future" else work.wait)


@pytest.mark.parametrize("how", ["wait", "poll", "future"])
@pytest.mark.parametrize(("fault", "message"), [(Stall(0, 0), "Timed out waiting"), (Kill(0, 0), "Connection closed")])
def test_the_handle_of_an_operation_tells_at_its_wait(how, fault, message):
    _, told = get_world("sim", faults=[fault]).run(wait_later, how, world_size=2)
    assert message in told


@pytest.mark.parametrize(("fault", "message"), LOSSES)
def test_a_future_that_is_asked_for_after_the_loss_is_done_and_holds_the_error(fault, message):
    def program():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        told = caught(work.wait)
        future = work.get_future()
        return told, future.done(), caught(future.value), caught(future.then(lambda done: done.value()).wait)

    (told, done, held, passed_on), _ = get_world("sim", schedule="first", faults=[fault]).run(program, world_size=2)
    assert message in told
    assert done
    assert message in held
    assert message in passed_on


@pytest.mark.parametrize(("fault", "message"), LOSSES)
def test_callbacks_of_a_future_are_called_when_its_operation_is_lost(fault, message):
    def program():
        seen = []
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.get_future().then(lambda done: seen.append(caught(done.value))).wait()
        return seen

    (seen,), _ = get_world("sim", schedule="first", faults=[fault]).run(program, world_size=2)
    assert message in seen


def test_a_time_limit_closes_also_the_connections_that_other_operations_of_the_rank_wait_on():
    def program():
        rank, x = dist.get_rank(), torch.ones(1)
        if rank == 0:
            work = dist.irecv(x, 2)  # rank 2 works, but sends nothing
            return caught(dist.recv, torch.ones(1), 1), caught(work.wait)
        return dist.send(x, 0) if rank == 1 else None

    (told, other), _, _ = get_world("sim", faults=[Stall(1, 0)]).run(program, world_size=3)
    assert "Timed out waiting" in told
    assert other == "[sim] Application timeout caused pair closure"


@pytest.mark.parametrize("schedule", ["first", "random:1"])
@pytest.mark.parametrize("fault", [Stall(1, 0), Kill(1, 0)])
def test_a_receive_from_any_source_does_without_the_rank(fault, schedule):
    def program():
        x = torch.full((1,), float(dist.get_rank()))
        if dist.get_rank():
            dist.send(x, 0)
        else:
            dist.recv(x)
        return x.item()

    zero, _, two = get_world("sim", schedule=schedule, faults=[fault]).run(program, world_size=3)
    assert (zero, two) == (2.0, 2.0)


SCHEDULES = ["first", "random:1", "random:2", "pct:1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", [Stall(1, 1), Kill(1, 1)])
def test_survivors_make_a_group_of_their_own(fault, schedule):
    def program():
        lost = caught(lambda: [dist.all_reduce(torch.ones(1)) for _ in range(2)])
        group, x = dist.new_group([0, 2]), torch.ones(1)
        dist.all_reduce(x, group=group)
        return lost != "", x.item()

    zero, _, two = get_world("sim", schedule=schedule, faults=[fault]).run(program, world_size=3)
    assert zero == two == (True, 2.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("fault", "error"), [(Stall(1, 0), RankStalled), (Kill(1, 0), RankDied)])
def test_members_of_a_new_group_wait_for_a_lost_member_and_others_do_not(fault, error, schedule):
    def program(handle):
        try:
            dist.new_group([1, 2], timeout=timedelta(seconds=3))
        except dist.DistStoreError as failure:
            if not handle:
                raise
            return str(failure)
        return ""

    world = get_world("sim", schedule=schedule, faults=[fault])
    zero, lost, two = world.run(program, True, world_size=3)
    assert isinstance(lost, error)
    assert (zero, two) == ("", "wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/0")
    with pytest.raises(error) as failure:
        world.run(program, False, world_size=3)
    assert "rank 2 gave up waiting, as rank 1 failed: wait timeout" in "\n".join(failure.value.__notes__)


@pytest.mark.parametrize(("other", "verdict"), [(None, Deadlock), ([0], CollectiveMismatch)])
def test_a_member_that_is_well_and_does_not_make_the_group_is_found_also_where_ranks_may_be_lost(other, verdict):
    def program():
        if dist.get_rank() == 1:
            dist.new_group([0, 1])
        elif dist.get_rank() == 0:
            dist.new_group(other) if other else dist.recv(torch.ones(1), 1)

    with pytest.raises(verdict, match="new_group"):
        get_world("sim", faults=[Kill(2, 0)]).run(program, world_size=3)


def reduce_in_halves():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.ones(1)
    dist.all_reduce(x, group=halves[dist.get_rank() // 2])
    return x.item()


@pytest.mark.parametrize("fault", [Stall(3, 2), Kill(3, 2)])  # after both groups are made
def test_in_a_sub_group_only_its_members_suffer(fault):
    def program():
        try:
            return reduce_in_halves()
        except RuntimeError:
            return "lost"

    zero, one, two, _ = get_world("sim", faults=[fault]).run(program, world_size=4)
    assert (zero, one, two) == (2.0, 2.0, "lost")


def train(steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(steps):
        model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    return model.module.weight.grad.sum().item()


def operations_of_ddp():
    """Return the number of operations that a rank posts to build the model."""
    for number in range(10):
        try:
            get_world("sim", faults=[Kill(1, number)]).run(train, 0, world_size=2)
        except RankDied:
            continue
        except (AttributeError, Inconclusive):
            return number
    raise AssertionError("too many")


@pytest.mark.parametrize("schedule", ["first", "random:1"])
@pytest.mark.parametrize(("fault", "error"), [(Kill, RankDied), (Stall, RankStalled)])
def test_a_backward_pass_of_ddp_loses_a_rank(fault, error, schedule):
    number = operations_of_ddp() + 1  # in the second step
    world = get_world("sim", schedule=schedule, faults=[fault(1, number)])
    with pytest.raises(error) as failure:
        world.run(train, 3, world_size=3)
    story = "\n".join(failure.value.__notes__)
    assert ("gave up waiting" if fault is Stall else "lost the connection") in story
    with world.open(3) as ranks:
        for _ in range(2):  # the ranks survive
            with pytest.raises(error):
                ranks.run(train, 3)
        world.faults = ()
        assert ranks.run(train, 2) == [4.0] * 3
    assert get_world("sim", schedule=schedule).run(train, 2, world_size=3) == [4.0] * 3


@pytest.mark.parametrize(("semantics", "before"), [("rendezvous", True), ("gloo", False)])
def test_a_poll_of_a_lost_message_says_what_it_says_of_others(semantics, before):
    """A poll follows gloo: false before the wait, and true after it; each wait raises."""

    def program():
        if dist.get_rank():
            return dist.barrier()
        work = dist.irecv(torch.zeros(1), 1)
        for _ in range(20):
            asked = work.is_completed()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Connection closed by peer"):
                work.wait()
        return asked, work.is_completed()

    world = get_world("sim", faults=[Kill(1, 0)], semantics=semantics, schedule="random:1")
    assert world.run(program, world_size=2)[0] == (before, True)
