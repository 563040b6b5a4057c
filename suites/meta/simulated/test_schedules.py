"""Schedules: each finds what it promises, a failure replays exactly, and is reduced to a few switches."""

from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import _get_default_store

from pdlcheck.errors import Deadlock, Inconclusive, ScheduleNotFollowed
from pdlcheck.strategies import schedules
from pdlcheck.worlds import get_world
from pdlcheck.worlds.outcome import Raised, Returned
from pdlcheck.worlds.simulated import SimulatedWorld
from pdlcheck.worlds.simulated.schedules import (
    PCT,
    Exhaustive,
    First,
    Random,
    Recorder,
    pct_bound,
    schedule_of,
    search,
    search_all,
)

from .schedule_programs import arrivals, election, first_come

SPECS = ["first", "random:3", "pct:5,2,40", "replay:1r2-4r1", "replay:"]


def run_under(program, world_size, *args, **kwargs):
    """Return the function that :func:`search` runs: new ranks each time."""

    def run(schedule):
        try:
            SimulatedWorld(schedule=schedule).run(program, *args, world_size=world_size, **kwargs)
        except (AssertionError, Deadlock) as error:
            return error
        return None

    return run


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_a_schedule_is_named_by_its_text(spec):
    assert str(schedule_of(spec)) == spec


@pytest.mark.parametrize(
    "spec", ["last", "first:1", "random:", "random:x", "pct", "pct:1,0", "pct:1,2,3,4", "replay", "replay:1-2", ""]
)
def test_an_unknown_schedule_is_refused_with_the_known_forms(spec):
    with pytest.raises(ValueError, match=r"schedule must be first, random\[:SEED\], pct:"):
        schedule_of(spec)


# -- what is the same under every schedule --------------------------------------------------------


def test_the_random_streams_of_a_rank_are_the_same_under_every_schedule():
    def program():
        drawn = []
        for _ in range(2):
            drawn += [torch.rand(1).item(), random.random(), np.random.rand()]
            dist.send(torch.zeros(1), 0) if dist.get_rank() else [dist.recv(torch.zeros(1)) for _ in range(2)]
        return drawn

    first, *others = (get_world("sim", schedule=spec).run(program, world_size=3) for spec in SPECS)
    assert all(other == first for other in others)
    assert get_world("sim", seed=1, schedule="first").run(program, world_size=3) != first


def test_schedules_differ_in_what_they_let_happen():
    orders = {tuple(get_world("sim", schedule=f"random:{seed}").run(arrivals, world_size=4)[0]) for seed in range(60)}
    assert len(orders) == math.factorial(3)
    assert get_world("sim", schedule="first").run(arrivals, world_size=4)[0] == [1, 2, 3]


# -- PCT ------------------------------------------------------------------------------------------


def test_pct_finds_a_bug_of_depth_1_at_least_as_often_as_its_bound_says():
    """Rank 2 must come before rank 1 on 3 ranks; 300 runs fall below half of the bound with probability under 1e-6."""
    recorder = Recorder(First())
    run = run_under(first_come, 3)
    assert run(recorder) is None
    bound = pct_bound(3, recorder.steps, 1)
    found = sum(run(PCT(seed, 1, recorder.steps)) is not None for seed in range(300))
    assert found >= 300 * bound / 2
    assert not any(run_under(first_come, 3, fair=True)(PCT(seed, 3, 20)) for seed in range(20))


def test_pct_finds_a_bug_of_depth_2_where_a_priority_changes_and_nowhere_else():
    """Rank 1 must come between two steps of rank 0."""

    def program():
        first, second = count_twice()
        assert dist.get_rank() or second == first + 1

    recorder = Recorder(First())
    run = run_under(program, 2)
    assert run(recorder) is None
    assert not any(run(PCT(seed, 1, recorder.steps)) for seed in range(50))
    found = sum(run(PCT(seed, 2, recorder.steps)) is not None for seed in range(300))
    assert found >= 300 * pct_bound(2, recorder.steps, 2) / 2


def test_pct_lets_a_rank_that_polls_wait_for_what_it_asks_about():
    def program():
        if dist.get_rank() == 1:
            dist.send(torch.ones(1), 0)
            return 0
        received, polls = torch.zeros(1), 0
        work = dist.irecv(received, 1)
        while not work.is_completed():
            polls += 1
        work.wait()
        assert received.item() == 1
        return polls

    polls = [get_world("sim", schedule=PCT(seed, 2, 10)).run(program, world_size=2)[0] for seed in range(10)]
    assert max(polls) <= 3, f"rank 0 asks {max(polls)} times in vain: it is to ask, and then to let rank 1 send"


# -- all schedules --------------------------------------------------------------------------------


def store():
    return _get_default_store()


def count_twice():
    return [store().add("n", 1), store().add("n", 1)]


def count_apart():
    return store().add(f"n{dist.get_rank()}", 1)


def reduce_twice():
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.all_reduce(x)
    return x.item()


def reduce_later():
    x = torch.ones(1)
    dist.all_reduce(x, async_op=True).wait()
    return x.item()


def ask_once():
    if dist.get_rank():
        return dist.send(torch.ones(1), 0)
    work = dist.irecv(torch.zeros(1), 1)
    known = work.is_completed()
    work.wait()
    return known


def look_or_leave():
    """Deadlock if rank 1 looks before rank 0 has written."""
    if dist.get_rank() == 0:
        return store().set("k", "v")
    return store().check(["k"]) or store().get("never")


def written_and_deleted():
    """Deadlock if the key is deleted before rank 1 waits for it."""
    if dist.get_rank() == 0:
        store().set("k", "v")
        return store().delete_key("k")
    return store().get("k")


def explored(program, world_size, reduction=True, limit=5000):
    """Return (results of the runs that end well, whether some fail, number of runs)."""
    search = Exhaustive(reduction=reduction)
    well, failing = set(), False
    while search.advance():
        with get_world("sim", schedule=search).open(world_size) as ranks:
            outcomes = ranks.outcomes(program)
        if all(isinstance(outcome, Returned) for outcome in outcomes):
            well.add(str([outcome.value for outcome in outcomes]))
        failing |= any(isinstance(outcome, Raised) for outcome in outcomes)
        assert search.runs + search.redundant < limit
    return well, failing, search.runs


@pytest.mark.parametrize(
    ("program", "world_size", "traces"),
    [
        (arrivals, 3, 2),  # orders of two sends that one any-source receive can take
        (arrivals, 5, 24),
        (count_twice, 2, 6),  # interleavings of two pairs of additions: 4! / (2! 2!)
        (count_twice, 3, 90),  # 6! / (2! 2! 2!)
        (count_apart, 5, 1),
        (reduce_twice, 4, 1),
        (reduce_later, 3, 6),  # user code runs between post and wait: it could see which ranks are there
        (ask_once, 2, 3),  # the send before the receive, between receive and poll, after both
        (look_or_leave, 2, 2),
    ],
)
def test_the_number_of_schedules_that_differ_is_what_theory_says(program, world_size, traces):
    assert explored(program, world_size)[2] == traces


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        (arrivals, 3),
        (ask_once, 2),
        (count_apart, 2),
        (count_twice, 2),
        (look_or_leave, 2),
        (reduce_later, 2),
        (reduce_twice, 2),
        (written_and_deleted, 2),
    ],
)
def test_the_reduction_misses_no_outcome_of_all_schedules(program, world_size):
    well, failing, runs = explored(program, world_size)
    all_well, some_fail, all_runs = explored(program, world_size, reduction=False)
    assert (well, failing) == (all_well, some_fail)
    assert runs < all_runs


def random_program(seed):
    """Draw a world size and, for each rank, a list of (operation, peer, number)."""
    draw = random.Random(seed)
    world_size = draw.choice([2, 2, 3])
    code = [[] for _ in range(world_size)]
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["message", "any", "collective", "store", "store", "ask", "branch"])
        number = draw.randrange(2)
        if kind in ("message", "any"):
            src, dst = draw.sample(range(world_size), 2)
            code[src].append((draw.choice(["send", "isend"]), dst, number))
            code[dst].append(("any", 0, number) if kind == "any" else (draw.choice(["recv", "irecv"]), src, number))
        elif kind == "collective":
            for rank in code:
                rank.append((draw.choice(["reduce", "ireduce"]), 0, number))
        elif kind == "store":
            for rank in draw.sample(code, 2):
                rank.append((draw.choice(["add", "add", "set", "check", "delete"]), 0, number))
        else:
            draw.choice(code).append((kind, 0, number))
    return world_size, code


def interpret(code):
    """Run one rank's list; return everything that the rank has seen."""
    rank = dist.get_rank()
    seen, works, tensors = [], [], []
    for name, peer, number in code[rank]:
        x = torch.full((1,), 10.0 * rank + len(tensors))
        tensors.append(x)
        match name:
            case "add":
                seen.append(store().add(f"n{number}", 1))
            case "set":
                store().set(f"k{number}", str(rank))
            case "check":
                seen.append(store().check([f"k{number}"]))
            case "delete":
                seen.append(store().delete_key(f"k{number}"))
            case "send":
                dist.send(x, peer)
            case "recv":
                dist.recv(x, peer)
            case "any":
                seen.append(dist.recv(x))
            case "isend":
                works.append(dist.isend(x, peer))
            case "irecv":
                works.append(dist.irecv(x, peer))
            case "reduce":
                dist.all_reduce(x)
            case "ireduce":
                works.append(dist.all_reduce(x, async_op=True))
            case "ask" if works:
                seen.append(works[-1].is_completed())
            case "branch" if seen and seen[-1] in (1, True):
                seen.append(store().get("never") if number else store().add("n0", 5))
        seen.append(x.item())
    for work in works:
        work.wait()
    return seen + [x.item() for x in tensors]


@pytest.mark.parametrize("seed", range(40))
def test_the_reduction_misses_no_outcome_of_a_random_program(seed):
    world_size, code = random_program(seed)

    def program():
        return interpret(code)

    well, failing, _ = explored(program, world_size)
    all_well, some_fail, _ = explored(program, world_size, reduction=False)
    assert (well, failing) == (all_well, some_fail)


def test_a_program_with_more_schedules_than_allowed_is_inconclusive():
    assert search_all(run_under(arrivals, 4), 100) is None
    with pytest.raises(Inconclusive, match="no schedule of the 3 that were run fails, but there are more"):
        search_all(run_under(arrivals, 4), 3)


def test_a_program_that_depends_on_more_than_its_schedule_is_told():
    calls = []

    def program():
        calls.append(dist.get_rank())
        if len(calls) % 2:
            store().add("n", 1)
        store().add("n", 1)

    with pytest.raises(ScheduleNotFollowed, match="does not depend on its schedule alone"):
        search_all(run_under(program, 3), 100)


# -- replay and shrinking -------------------------------------------------------------------------


def test_what_a_recorder_wrote_down_replays_the_run():
    for seed in range(10):
        recorder = Recorder(Random(seed))
        order = SimulatedWorld(schedule=recorder).run(arrivals, world_size=5)
        assert SimulatedWorld(schedule=str(recorder.replay())).run(arrivals, world_size=5) == order


def test_a_replay_of_another_program_is_told():
    with pytest.raises(ScheduleNotFollowed, match="at choice 0 rank 4 cannot go on"):
        SimulatedWorld(schedule="replay:0r4").run(arrivals, world_size=3)


def test_a_failure_in_a_script_prints_what_replays_it():
    failing = next(seed for seed in range(100) if run_under(first_come, 3)(Random(seed)))
    with pytest.raises(AssertionError) as caught:
        SimulatedWorld(schedule=f"random:{failing}").run(first_come, world_size=3)
    (line,) = [note for note in caught.value.__notes__ if note.startswith("replay: ")]
    again = eval(line.removeprefix("replay: "))
    for _ in range(20):
        with pytest.raises(AssertionError) as repeated:
            again.run(first_come, world_size=3)
        assert str(repeated.value) == str(caught.value)
        assert repeated.value.__notes__ == caught.value.__notes__


def test_a_failing_schedule_is_reduced_to_the_switch_that_matters():
    failure = search(run_under(first_come, 5), 50)
    assert failure is not None
    assert failure.switches > 1
    assert len(failure.replay.switches) == 1
    assert str(run_under(first_come, 5)(failure.replay)) == str(failure.error)
    assert search(run_under(first_come, 5, fair=True), 50) is None


@pytest.mark.slow
def test_a_deadlock_of_64_ranks_that_needs_one_order_in_thousands():
    """The last rank's three bids come before those of 62 others: PCT finds it, it replays, one switch remains."""
    with get_world("sim").open(64) as ranks:

        def run(schedule):
            outcomes = ranks.run_bodies([election] * 64, schedule)
            return next((o.error for o in outcomes if isinstance(o, Raised)), None)

        assert run(First()) is None
        failure = search(run, 150)
        assert isinstance(failure.error, Deadlock)
        assert "rank 0: blocked in send to rank 63 tag 2" in str(failure.error)
        assert len(failure.replay.switches) == 1
        for _ in range(20):
            assert str(run(failure.replay)) == str(failure.error)
        outcomes = ranks.run_bodies([partial(election, distinct=True)] * 64, failure.replay)
        assert all(isinstance(outcome, Returned) for outcome in outcomes)


# -- Hypothesis -----------------------------------------------------------------------------------


def shrunk_example(**strategies):
    """Return Hypothesis' smallest example for a property of the order of arrival."""
    failing = []

    @settings(max_examples=300, database=None, phases=[Phase.generate, Phase.shrink], deadline=None)
    @given(**strategies)
    def first_rank_comes_first(world_size, schedule, values):
        order = get_world("sim", schedule=schedule).run(arrivals, world_size=world_size)[0]
        if order[0] != 1 and sum(values) > 3:
            failing[:] = [world_size, schedule_of(str(schedule)).switches, values]
            raise AssertionError(order)

    with pytest.raises(AssertionError):
        first_rank_comes_first()
    return failing


def test_inputs_world_size_and_schedule_shrink_together():
    world_size, switches, values = shrunk_example(
        world_size=st.integers(2, 6), schedule=schedules(), values=st.lists(st.integers(0, 9))
    )
    assert world_size == 3
    assert len(switches) == 1
    assert values == [4]
