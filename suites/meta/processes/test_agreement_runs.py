"""Drawn runs of the agreement of ranks: of the model, and of the real coordinators, arbiter and collector."""

from __future__ import annotations

import os
import pickle
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.operations.table import METHODS
from pdlcheck.worlds.observe import Operation, Signature
from pdlcheck.worlds.outcome import Raised, Returned
from pdlcheck.worlds.processes.controller.arbiter import Arbiter
from pdlcheck.worlds.processes.controller.collect import Collector
from pdlcheck.worlds.processes.exchange.agreement import ON_RANK, Effect, Event, State, Step
from pdlcheck.worlds.processes.exchange.board import Board, shared_file
from pdlcheck.worlds.processes.exchange.messages import Aftermath, Done, Failed, Halted, Stop
from pdlcheck.worlds.processes.exchange.own_time import OwnTime
from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator
from suites.meta.processes.agreement_model import Model
from suites.meta.processes.agreement_programs import Broken, Do, Program, Tables

MANY_STEPS = 4000  # a run that takes more of them after the drawn ones does not end


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program whose ranks post the same operations in one order, with at most one defect."""
    world_size = draw(st.integers(2, 3))
    count = draw(st.integers(1, 3))
    ways = tuple(draw(st.integers(0, 1)) for _ in range(count))
    slots = tuple(draw(st.integers(0, count - 1)) for _ in range(count)) if draw(st.booleans()) else tuple(range(count))
    ranks = []
    for _ in range(world_size):
        todo: list[Do] = []
        late: list[Do] = []
        for operation in range(count):
            how = draw(st.sampled_from(["sync", "async", "late", "try"]))
            todo.append(Do("sync" if how == "sync" else "async", operation))
            todo += [Do("try", operation)] if how == "try" else []
            late += [Do("wait", operation)] if how in ("late", "try") else []
        ranks.append(todo + late)
    defect = draw(st.sampled_from(["none", "none", "raise", "mortal", "mismatch"]))
    culprit = draw(st.integers(0, world_size - 1))
    conditions: dict[str, Any] = {
        "unseen": frozenset(draw(st.sets(st.integers(0, count - 1), max_size=1))),
        "unlogged": frozenset(draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, count - 1)), max_size=1))),
    }
    if defect == "raise":
        ranks[culprit].insert(draw(st.integers(0, len(ranks[culprit]))), Do("raise"))
    elif defect == "mortal":
        conditions["mortal"] = frozenset({culprit})
    elif defect == "mismatch":
        ranks[culprit] = [
            do._replace(variant=1) if do.name == count - 1 and do.what in ("sync", "async") else do
            for do in ranks[culprit]
        ]
        conditions["expected"] = "mismatch"
    return Program(tuple(map(tuple, ranks)), ways=ways, slots=slots, **conditions)


class Runs(RuleBasedStateMachine):
    """Runs of the model in which the drawn rank or message comes next."""

    tables = Tables()

    @initialize(program=programs())
    def begin(self, program: Program) -> None:
        self.model = Model(program, self.tables)

    @rule(which=st.integers(0, 30), times=st.integers(1, 12))
    def take_steps(self, which: int, times: int) -> None:
        """Take steps of one kind, such as those of one rank, as long as there are some."""
        for _ in range(times):
            steps = list(self.model.steps())
            if steps:
                _, step = steps[which % len(steps)]
                step(self.model)

    @rule(number=st.integers(0, 2), times=st.integers(1, 30))
    def let_a_rank_run(self, number: int, times: int) -> None:
        """Let one rank run while the others stand still."""
        for _ in range(times):
            steps = [step for name, step in self.model.steps() if name.startswith(f"rank {number}:")]
            if steps:
                steps[0](self.model)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        """Let every rank and message go on, none of them less often than the others, until the run is over."""
        if not hasattr(self, "model"):
            return
        last: dict[str, int] = {}
        for number in range(MANY_STEPS):
            steps = [(name, step) for name, step in self.model.steps() if not name.endswith("dies")]
            if not steps:
                break
            name, step = min(steps, key=lambda each: last.get(each[0], -1))
            last[name] = number
            step(self.model)
            self.model.check()
        if not self.model.is_over():
            raise Broken("ranks wait for ever")
        self.model.check_end()


Runs.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRuns = Runs.TestCase

LAUNCH = Step(State.LAUNCHED, None, Effect.LAUNCH)


@pytest.mark.parametrize(
    ("event", "step", "state"),
    [
        (Event.BLOCKED, LAUNCH, State.WAITING),
        (Event.ASK_AND_WAIT, Step(State.WAITING), State.WAITING),
        (Event.GRANT, Step(State.ASKED), State.ASKED),
    ],
    ids=["goes too early", "never asks", "takes no grant"],
)
def test_drawn_runs_reject_a_broken_table(event, step, state):
    class WrongRuns(Runs):
        tables = Tables(rank={**ON_RANK, (state, event): step})

    with pytest.raises(Broken):
        run_state_machine_as_test(
            WrongRuns,
            settings=settings(
                max_examples=500, deadline=None, database=None, phases=[Phase.generate], report_multiple_bugs=False
            ),
        )


# -- the real interpreters -------------------------------------------------------------------------


class RealRun:
    """A run of the real coordinators, with the real collector and arbiter, in one thread.

    The drawn rank or message comes next. A rank may be interrupted by others each time it reads or writes the board.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self.program, self.chance = program, random.Random(seed)
        self.size = len(program.ranks)
        self.launched: dict[int, set[int]] = {operation: set() for operation in range(len(program.ways))}
        fd = shared_file(self.size)
        self.boards = [Board(fd, self.size) for _ in range(self.size + 1)]
        os.close(fd)
        self.up: list[deque[Any]] = [deque() for _ in range(self.size)]
        self.down: list[deque[Any]] = [deque() for _ in range(self.size)]
        self.active: list[int] = []  # ranks in the middle of a step, innermost last
        self.ranks = [RealRank(self, number) for number in range(self.size)]
        members = [
            SimpleNamespace(
                rank=number,
                died=None,
                send=self.down[number].append,
                own_time=lambda: OwnTime(lambda: 0.0),
                is_stopped=bool,
                output=lambda: ("", ""),
            )
            for number in range(self.size)
        ]
        self.members = members
        self.collector = Collector(members, 1, self.wait, Arbiter(self.size), self.boards[-1], timeout_s=60)  # type: ignore[arg-type]

    def wait(self, _: float) -> list[tuple[Any, Any]]:
        """Let drawn ranks run until the collector gets a message."""
        for _ in range(MANY_STEPS):
            readable = [number for number in range(self.size) if self.up[number]]
            runnable = [rank.number for rank in self.ranks if rank.can_run()]
            if not runnable and not readable:
                return []
            turn = self.chance.choice([*(~number for number in readable), *runnable])
            if turn < 0:
                return [(self.members[~turn], self.up[~turn].popleft())]
            self.ranks[turn].run()
        raise Broken("ranks wait for ever")

    def interrupt(self) -> None:
        """Let other ranks run in the middle of a rank's step."""
        if len(self.active) > 2:
            return
        others = [rank for rank in self.ranks if rank.number not in self.active and rank.can_run()]
        if others and self.chance.random() < 0.25:
            self.chance.choice(others).run()

    def close(self) -> None:
        for board in self.boards:
            board.close()


class RealRank:
    """The main thread of a rank and its control thread, one step at a time."""

    def __init__(self, run: RealRun, number: int) -> None:
        self.all, self.number = run, number
        board = run.boards[number]
        read, write = board.states, board.say

        def states(*args: Any) -> list[int]:
            run.interrupt()
            return read(*args)

        def say(*args: Any) -> int:
            run.interrupt()
            return write(*args)

        board.states, board.say = states, say  # type: ignore[method-assign]
        self.coordinator = OperationCoordinator(number, run.size, run.up[number].append, board)
        self.coordinator._resolve_doubts_elsewhere = self.coordinator._resolve_doubts  # no threads
        self.coordinator.begin(1)
        self.works: dict[int, Any] = {}
        self.pc = self.looks = 0
        self.has_ended = self.is_stopped = False

    def can_run(self) -> bool:
        return bool(self.all.down[self.number]) or not self.has_ended

    def run(self) -> None:
        self.all.active.append(self.number)
        try:
            if self.all.down[self.number] and (self.has_ended or self.all.chance.random() < 0.5):
                message = self.all.down[self.number].popleft()
                self.is_stopped |= isinstance(message, Stop)
                self.coordinator.handle(message)
            elif not self.has_ended:
                self.go_on()
        finally:
            self.all.active.pop()

    def go_on(self) -> None:
        todo = self.all.program.ranks[self.number]
        if self.pc == len(todo):
            self.coordinator.end(failed=False)
            self.end(Done(1, pickle.dumps(None), self.aftermath()))
            return
        do = todo[self.pc]
        if do.what == "raise":
            self.fail("LookupError")
        elif do.what in ("sync", "async") and do.name not in self.works:
            self.post(do)
        elif do.what == "async":
            self.pc += 1
        else:
            self.wait_for(self.works[do.name], gives_up=do.what == "try")

    def post(self, do: Do) -> None:
        way = self.all.program.ways[do.name]
        seq = self.all.program.ways[: do.name].count(way)
        members = tuple(range(self.all.size))
        uneven = do.name in self.all.program.unseen
        splits = ((do.variant + 1, 3 - do.variant), (do.variant + 1, 3 - do.variant)) if uneven else ((), ())
        signature = Signature(
            rank=self.number,
            op="all_reduce",
            group=str(way),
            members=members,
            seq=seq,
            shapes=((2 + do.variant,),),
            dtypes=("float32",),
            reduce_op="SUM",
            splits=splits,
            where=f"train.py:{do.name}",
        )
        group = SimpleNamespace(allreduce=self.launch, name=lambda: "gloo")
        operation = Operation(signature, (), METHODS["allreduce"], (do.name,), is_async=do.what == "async")
        try:
            self.works[do.name] = self.coordinator.post(operation, group)
        except Exception as error:  # the controller has refused all operations
            self.fail(type(error).__name__)

    def launch(self, operation: int) -> Any:
        gone = self.all.launched[operation]
        gone.add(self.number)
        return SimpleNamespace(is_completed=lambda: len(gone) == self.all.size)

    def wait_for(self, work: Any, *, gives_up: bool) -> None:
        if work._error is not None:
            self.fail(type(work._error).__name__)
        elif work.is_decided:
            if work.was_left:
                self.coordinator.await_peers(work, 0.0)
            if work.has_moved():
                self.pc += 1
            elif self.is_stopped:
                self.end(Halted(1, "in all_reduce"))
        elif self.all.chance.random() < 0.5 or not self.coordinator.look(work, 0.0):
            self.coordinator.request_grant(work, waits=not gives_up)
            self.coordinator.advance(work)
            self.pc += gives_up

    def fail(self, kind: str) -> None:
        self.coordinator.end(failed=True)
        after = self.aftermath()
        if kind == "LookupError":
            self.end(Failed(1, None, kind, "no such sample", "", "", False, after))
        else:
            self.end(Halted(1, kind, after))

    def end(self, report: Any) -> None:
        self.has_ended = True
        self.all.up[self.number].append(report)

    def aftermath(self) -> Aftermath:
        coordinator = self.coordinator
        return Aftermath(not coordinator.is_torn, 1, 1, tuple(coordinator.withdrawn), coordinator.has_open)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs().filter(lambda program: not program.mortal), seed=st.integers(0, 2**32))
def test_drawn_runs_of_the_real_ranks_and_the_real_controller(program, seed):
    run = RealRun(program, seed)
    try:
        outcomes = run.collector.outcomes()
        for number, sent in enumerate(run.down):  # what the controller sent before the call was over
            while sent:
                run.ranks[number].run()
        verdicts = [
            o.error for o in outcomes if isinstance(o, Raised) and isinstance(o.error, CollectiveMismatch | Deadlock)
        ]
        if program.expected:
            assert any(isinstance(error, CollectiveMismatch) for error in verdicts), outcomes
        elif not program.may_fail:
            assert all(isinstance(outcome, Returned) for outcome in outcomes), outcomes
        assert not verdicts or program.expected, verdicts
        for operation, ranks in run.launched.items():
            if not program.may_fail and not program.expected:
                assert len(ranks) == run.size, f"only {ranks} have launched {operation}"
            elif ranks and len(ranks) < run.size:
                assert not run.collector.can_go_on(), f"only {ranks} have launched {operation}"
    finally:
        run.close()
