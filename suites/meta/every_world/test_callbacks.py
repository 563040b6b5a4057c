"""Callbacks of futures that communicate: they are the rank's current work, and their verdict stays the verdict."""

from __future__ import annotations

from contextlib import closing
from traceback import walk_tb

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch, Deadlock, PdlcheckError
from pdlcheck.worlds import get_world
from pdlcheck.worlds.observe.naming import line_and_names
from pdlcheck.worlds.outcome import Stopped
from pdlcheck.worlds.semantics import PROFILES
from pdlcheck.worlds.simulated.cluster import ISOLATION
from pdlcheck.worlds.simulated.schedules.protocol import usual
from pdlcheck.worlds.simulated.scheduling.scheduler import Scheduler

from ..needs_mpi import needs_mpi

SCHEDULES = ["first", *(f"random:{seed}" for seed in range(6))]


def reduced(x):
    return dist.all_reduce(x, async_op=True).get_future()


def in_a_chain():
    """Start each reduction in the callback of the one before."""
    x, y, z = torch.ones(2), torch.ones(3), torch.ones(4)
    future = reduced(x).then(lambda _: reduced(y).wait()).then(lambda _: reduced(z).wait())
    future.wait()
    return [t.tolist() for t in (x, y, z)]


def with_a_message_between(ends):
    """Reduce, and wait in the callback for a message that rank 1 may not send."""
    x, y = torch.ones(2), torch.zeros(1)

    def exchange(_):
        if dist.get_rank() == 0:
            dist.recv(y, 1)
        elif ends:
            dist.send(torch.ones(1), 0)

    reduced(x).then(exchange).wait()
    return y.item()


def two_chains(in_order):
    """Start the second reductions when the first arrive, as torch's PowerSGD does with two buckets."""
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


class Patient:
    """The usual schedule with a limit on choices, because a run that ends needs few."""

    every_step = True
    every_post = True

    def begin(self, world_size):
        self.left = 1000

    def choose(self, point):
        self.left -= 1
        if self.left == 0:
            raise AssertionError(f"the run does not end: rank {point.current} goes on although it waits")
        return usual(point)


def interrupted_and_never_served():
    """Run the callback of a reduction while rank 0 waits for a message that no rank sends."""
    x = torch.ones(2)
    if dist.get_rank() == 1:
        dist.all_reduce(x)
        return
    reduced(x).then(lambda _: None)
    dist.recv(torch.ones(2), 1)


def test_after_a_callback_the_rank_waits_for_what_it_waited_for_before():
    with pytest.raises(Deadlock, match=r"rank 0: blocked in recv from rank 1 .*; waits for rank 1"):
        get_world("sim", schedule=Patient()).run(interrupted_and_never_served, world_size=2)


def outcomes_around(callback):
    """Return the outcomes of two ranks: rank 1 gives the waiting rank 0 a callback, and fails."""
    scheduler = Scheduler(2, ISOLATION, stuck=lambda waiting, ranks: PdlcheckError("stuck"))
    scheduler.seed(0)
    first = scheduler.ranks[0]

    def waits():
        scheduler.wait_until(lambda: False, "the outer call")

    def hands_over():
        first.on_resume.append(lambda: callback(scheduler, first))
        raise ValueError("ill")

    try:
        return scheduler.run([waits, hands_over], Patient())
    finally:
        scheduler.close()


def test_in_a_callback_a_rank_runs_its_own_code():
    seen = []
    outcomes_around(lambda _, rank: seen.append((rank.ready, rank.waits_for)))
    assert seen == [(None, None)]


def test_a_rank_that_is_stopped_in_a_callback_was_in_the_call_of_the_callback():
    ended, _ = outcomes_around(lambda scheduler, _: scheduler.wait_until(lambda: False, "the call of the callback"))
    assert ended == Stopped(0, "in the call of the callback")
    ended, _ = outcomes_around(lambda scheduler, _: None)
    assert ended == Stopped(0, "in the outer call")


def test_a_verdict_in_a_callback_has_the_traceback_of_the_program():
    with pytest.raises(Deadlock) as caught:
        get_world("sim").run(with_a_message_between, False, world_size=2)
    functions = [frame.f_code.co_name for frame, _ in walk_tb(caught.value.__traceback__)]
    assert "with_a_message_between" in functions


def told_before_it_is_waited_for():
    """Pass on the future's value in the callback; both are done when the rank waits."""
    future = reduced(torch.ones(2 + dist.get_rank())).then(lambda done: done.value()[0] + 1)
    while not future.done():
        pass
    return future.wait()


@pytest.mark.parametrize("world", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_a_verdict_that_a_callback_hands_on_is_still_the_verdict(world):
    with closing(get_world(world)) as opened, opened.open(2) as ranks:
        outcomes = ranks.outcomes(told_before_it_is_waited_for)
        kinds = {
            type(outcome.error) for outcome in outcomes if not isinstance(outcome, Stopped)
        }  # one may arrive too late
        assert kinds == {CollectiveMismatch}


def test_an_error_of_the_users_own_in_a_callback_stays_his():
    def program():
        def looks_up(_):
            return {}["mine"]

        reduced(torch.ones(1)).then(looks_up).wait()

    with pytest.raises(RuntimeError, match="running the callback: KeyError: 'mine'"):
        get_world("sim").run(program, world_size=2)


def test_an_error_that_answers_a_verdict_stays_the_users():
    def program():
        try:
            dist.recv(torch.ones(1), 1 - dist.get_rank())
        except Deadlock:
            raise LookupError("tidied up") from None

    with get_world("sim").open(2) as ranks:
        assert [type(outcome.error) for outcome in ranks.outcomes(program)] == [LookupError, LookupError]


def waits_for_what_has_come():
    """Call ``wait`` in the callback for the tensors of the future that called it, as torch's gradient hooks do."""
    x = torch.full((2,), dist.get_rank() + 1.0)
    doubled = reduced(x).then(lambda future: [2 * y for y in future.wait()])
    return doubled.then(lambda future: (future.wait()[0] + 1).tolist()).wait()


@pytest.mark.parametrize("world", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_in_a_callback_wait_gives_the_result_at_once(world):
    with closing(get_world(world)) as ranks:
        assert ranks.run(waits_for_what_has_come, world_size=2) == [[7.0, 7.0]] * 2


def waits_when_the_backward_pass_ends():
    """Wait at the end of the backward pass, as a reducer does that starts to wait before the watch."""
    engine, told = torch.autograd.Variable._execution_engine, []

    def begin(grad):
        engine.queue_callback(lambda: told.append(doubled.wait()))
        doubled = reduced(grad.clone()).then(lambda future: (2 * future.value()[0]).tolist())

    x = torch.ones(2, requires_grad=True)
    x.register_hook(begin)
    (x * (dist.get_rank() + 1)).sum().backward()
    return told


@pytest.mark.parametrize("world", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_what_a_callback_gives_can_be_waited_for_at_the_end_of_a_backward_pass(world):
    with closing(get_world(world, **({} if world == "sim" else {"timeout_s": 20}))) as ranks:
        assert ranks.run(waits_when_the_backward_pass_ends, world_size=2) == [[[6.0, 6.0]]] * 2


def test_a_callback_calls_a_tensor_as_its_own_function_does():
    """The frames that it interrupts depend on the schedule, so ranks cannot compare them."""

    def program():
        outer, told = torch.ones(1), []

        def callback(_):
            inner = outer
            told.append([name.text for name in line_and_names(inner)[1]])

        reduced(outer).then(callback).wait()
        told.append([name.text for name in line_and_names(outer)[1]])
        return told

    for in_callback, outside in get_world("sim").run(program, world_size=2):
        assert sorted(in_callback) == ["inner", "outer"]  # only the callback's names: no name twice
        assert outside[0] == "outer"


def waits_in_a_hook():
    """Wait in a hook, as torch's hooks do that overlap the optimizer with the backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    def hook(wrapper, bucket):
        wrapper.reducer._run_allreduce_hook(bucket).wait()
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    torch.manual_seed(0)
    wrapper = DistributedDataParallel(torch.nn.Linear(4, 2), bucket_cap_mb=1e-5)
    wrapper.register_comm_hook(wrapper, hook)
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(torch.full((3, 4), dist.get_rank() + 1.0)).sum().backward()
    return wrapper.module.weight.grad.tolist()


@pytest.mark.parametrize("name", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_a_hook_of_ddp_waits_for_the_all_reduce_of_the_reducer(name):
    """The reducer waits in C++ inside the backward pass; regression test: on processes the wait never ended."""
    world = get_world(name) if name == "sim" else get_world(name, timeout_s=20.0)
    try:
        assert world.run(waits_in_a_hook, world_size=2) == [[[9.0] * 4] * 2] * 2  # it adds, and does not divide
    finally:
        world.close()
