"""An operation goes on all of its ranks or on none: every run of small programs, and tables that a search rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlcheck.worlds.processes.exchange.agreement import (
    ABSENT,
    ASKS,
    ON_CONTROLLER,
    ON_RANK,
    Effect,
    Event,
    Notice,
    Ruling,
    Stage,
    State,
    Step,
)
from suites.meta.processes.agreement_programs import Broken, Do, Program, Tables
from suites.meta.processes.agreement_search import search

SYNC, OTHER = Do("sync", 0), Do("sync", 1)
ASYNC, TRY, WAIT = Do("async", 0), Do("try", 0), Do("wait", 0)
RAISE, SET, AWAIT = Do("raise"), Do("set"), Do("await")
ONE = {"ways": (0,), "slots": (0,)}
TWO = {"ways": (0, 0), "slots": (0, 1)}
APART = {"ways": (0, 1), "slots": (0, 1)}  # two channels
COLLIDING = {"ways": (0, 1), "slots": (0, 0)}

PROGRAMS = {
    "two ranks, two operations": Program(((SYNC, OTHER), (SYNC, OTHER)), **TWO),
    "a rank that never waits": Program(((SYNC,), (ASYNC,)), **ONE),
    "no rank waits": Program(((ASYNC,), (ASYNC,)), **ONE),
    "a rank that never posts, and none that waits": Program(((ASYNC,), ()), **ONE),
    "a rank that is busy until the other has gone on": Program(((SYNC, SET), (ASYNC, AWAIT, WAIT)), **ONE),
    "a rank that gives up waiting": Program(((SYNC, SET), (ASYNC, TRY, AWAIT, WAIT)), **ONE),
    "only the controller can match": Program(((SYNC, OTHER), (ASYNC, OTHER, WAIT)), **TWO, unseen=frozenset({0})),
    "a log without room": Program(((SYNC, OTHER), (SYNC, OTHER)), **TWO, unlogged=frozenset({(1, 0)})),
    "a rank that raises": Program(((SYNC,), (ASYNC, RAISE)), **ONE),
    "a rank that raises, and one that never waits": Program(((ASYNC,), (ASYNC, RAISE)), **ONE),
    "a rank that raises, and one that gives up waiting": Program(((ASYNC, TRY), (ASYNC, RAISE)), **ONE),
    "a rank that dies": Program(((SYNC,), (SYNC,)), **ONE, mortal=frozenset({1})),
    "a mismatch": Program(((SYNC,), (Do("sync", 0, 1),)), **ONE, expected="mismatch"),
    "a mismatch that no rank waits for": Program(((ASYNC,), (Do("async", 0, 1),)), **ONE, expected="mismatch"),
    "a mismatch with a rank that only posts": Program(((SYNC,), (Do("async", 0, 1),)), **ONE, expected="mismatch"),
    "a mismatch for the controller alone": Program(
        ((SYNC,), (Do("sync", 0, 1),)), **ONE, unseen=frozenset({0}), expected="mismatch"
    ),
    "an operation that one rank lacks": Program(((SYNC, OTHER), (SYNC,)), **TWO, expected="deadlock"),
    "two channels, crosswise": Program(((SYNC, OTHER), (OTHER, SYNC)), **APART, expected="deadlock"),
}
SLOW = {
    "two ranks, two operations, one waited for late": Program(
        ((ASYNC, OTHER, WAIT), (SYNC, OTHER)), **TWO, at_once=True
    ),
    "two channels, in another order": Program(((ASYNC, OTHER, WAIT), (Do("async", 1), SYNC, Do("wait", 1))), **APART),
    "three ranks, one operation": Program(((SYNC,), (ASYNC,), (ASYNC,)), **ONE, at_once=True),
    "a rank that gives up waiting for another channel": Program(((OTHER, SYNC), (ASYNC, TRY, OTHER, WAIT)), **APART),
    "two operations with one word": Program(((ASYNC, OTHER, WAIT), (ASYNC, OTHER, WAIT)), **COLLIDING, at_once=True),
    "two operations with one word, one rank busy": Program(
        ((SYNC, OTHER, SET), (ASYNC, Do("async", 1), AWAIT, WAIT)), **COLLIDING
    ),
    "a rank that raises after an operation": Program(((SYNC, OTHER), (SYNC, Do("async", 1), RAISE)), **TWO),
    "two operations with one word, and a rank that raises": Program(
        ((ASYNC, OTHER, WAIT), (ASYNC, Do("async", 1), RAISE)), **COLLIDING, at_once=True
    ),
    "three ranks, one raises": Program(((SYNC,), (SYNC,), (ASYNC, RAISE)), **ONE, at_once=True),
    "a mismatch at the second operation": Program(
        ((SYNC, OTHER), (SYNC, Do("sync", 1, 1))), **TWO, expected="mismatch", at_once=True
    ),
    "three ranks that wait": Program(((SYNC,), (SYNC,), (SYNC,)), **ONE, at_once=True),
    "three ranks, each reads one word after the other": Program(((SYNC,), (SYNC,), (ASYNC,)), **ONE),
}


def test_the_architecture_shows_every_state():
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    for state in (*State, *Stage):
        assert f"| `{state.name}` |" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_run_keeps_the_invariants(name):
    found = search(PROGRAMS[name])
    assert found.ends


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_run_of_a_larger_program_keeps_the_invariants(name):
    assert search(SLOW[name]).ends


# -- every check can fail --------------------------------------------------------------------------


def with_rank(*changes: tuple[State, Event, Step]) -> Tables:
    """Return the tables with other steps of a rank."""
    return Tables(rank={**ON_RANK, **{(state, event): step for state, event, step in changes}})


def with_controller(*changes: tuple[Stage, Notice, Ruling]) -> Tables:
    """Return the tables with other steps of the controller."""
    return Tables(controller={**ON_CONTROLLER, **{(stage, notice): ruling for stage, notice, ruling in changes}})


LAUNCH = Step(State.LAUNCHED, None, Effect.LAUNCH)
BROKEN = {
    "goes although another rank has withdrawn": (
        "a rank that raises, and one that never waits",
        with_rank((State.GOING, Event.VANISHED, LAUNCH)),
        "only ranks",
    ),
    "goes without a word, so that a rank that withdraws does not see it": (
        "a rank that raises, and one that never waits",
        with_rank((State.POSTED, Event.READY, Step(State.GOING, None, Effect.READ_AGAIN))),
        "only ranks",
    ),
    "goes without a second reading": (
        "a rank that raises, and one that never waits",
        with_rank((State.POSTED, Event.READY, LAUNCH)),
        "only ranks",
    ),
    "withdraws without looking whether another rank goes": (
        "a rank that raises, and one that never waits",
        with_rank((State.POSTED, Event.WITHDRAW, Step(State.WITHDRAWN, ABSENT))),
        "only ranks",
    ),
    "withdraws and leaves its word": (
        "a rank that raises, and one that never waits",
        with_rank((State.POSTED, Event.WITHDRAW, Step(State.WITHDRAWN, None, Effect.LOOK_FOR_GOES))),
        "only ranks",
    ),
    "goes before the others have posted": (
        "two ranks, two operations",
        with_rank((State.WAITING, Event.BLOCKED, LAUNCH)),
        "has not posted it",
    ),
    "goes with an operation that does not match": (
        "a mismatch",
        with_rank((State.WAITING, Event.BLOCKED, LAUNCH)),
        "has not posted it",
    ),
    "never asks": (
        "a mismatch",
        with_rank((State.WAITING, Event.ASK_AND_WAIT, Step(State.WAITING))),
        "ranks wait for ever",
    ),
    "asks without saying that it waits": (
        "an operation that one rank lacks",
        with_rank((State.WAITING, Event.ASK_AND_WAIT, Step(State.ASKED, ASKS, Effect.REQUEST))),
        "ranks wait for ever",
    ),
    "says that it waits, and gives up": (
        "a rank that gives up waiting for another channel",
        with_rank((State.WAITING, Event.ASK, Step(State.ASKED, ASKS, Effect.REQUEST_AND_WAIT))),
        "the verdict is deadlock, expected none",
    ),
    "leaves a busy rank alone": (
        "a rank that is busy until the other has gone on",
        with_rank((State.LEFT, Event.PEER_BUSY, Step(State.LAUNCHED))),
        "ranks wait for ever",
    ),
    "does not see that another rank is busy": (
        "a rank that is busy until the other has gone on",
        with_rank((State.GOING, Event.CONFIRMED_BUSY, LAUNCH)),
        "ranks wait for ever",
    ),
    "asks and leaves the word of a rank that waits": (
        "a rank that gives up waiting",
        with_rank((State.WAITING, Event.ASK, Step(State.ASKED, None, Effect.REQUEST))),
        "ranks wait for ever",
    ),
    "does not take a grant": (
        "only the controller can match",
        with_rank((State.ASKED, Event.GRANT, Step(State.ASKED))),
        "ranks wait for ever",
    ),
    "forgets a doubt": (
        "two operations with one word",
        with_rank((State.GOING, Event.VANISHED, Step(State.GOING))),
        "no step for",
    ),
    "controller does not grant what was matched before": (
        "a rank that is busy until the other has gone on",
        with_controller((Stage.MATCHED, Notice.REQUEST, Ruling(Stage.MATCHED))),
        "ranks wait for ever",
    ),
    "controller grants what a rank has withdrawn": (
        "a rank that raises, and one that gives up waiting",
        with_controller((Stage.UNKNOWN, Notice.WITHDRAW, Ruling(Stage.UNKNOWN))),
        "only ranks",
    ),
    "controller does not see that a granted operation was withdrawn": (
        "a rank that raises, and one that gives up waiting",
        with_controller((Stage.GRANTED, Notice.WITHDRAW, Ruling(Stage.WITHDRAWN))),
        "only ranks",
    ),
    "controller grants nothing": (
        "only the controller can match",
        with_controller(*((stage, Notice.GRANT, Ruling(Stage.GRANTED)) for stage in Stage if stage < Stage.GRANTED)),
        "ranks wait for ever",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_search_rejects_a_table_that(name):
    program, tables, why = BROKEN[name]
    with pytest.raises(Broken, match=why) as caught:
        search((PROGRAMS | SLOW)[program], tables)
    assert caught.value.__notes__, "the run that leads there"
