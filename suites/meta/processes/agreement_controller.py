"""The model's controller; the names follow ``arbiter.py`` and ``collect.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from pdlcheck.worlds.processes.exchange.agreement import Notice, Stage, Verb, may_grant
from suites.meta.processes.agreement_programs import Broken, Program, Tables

__all__ = ["Controller", "put"]

T = TypeVar("T")
Messages = tuple[tuple[object, ...], ...]


class Controller:
    """The state of the controller, and of the pipes and logs between it and the ranks."""

    def __init__(self, program: Program, tables: Tables) -> None:
        self.program, self.tables, self.size = program, tables, len(program.ranks)
        self.logs: tuple[tuple[tuple[int, int], ...], ...] = ((),) * self.size  # (operation, variant), not read yet
        self.up: tuple[Messages, ...] = ((),) * self.size  # messages to the controller
        self.down: tuple[Messages, ...] = ((),) * self.size  # messages to the rank
        self.dead: frozenset[int] = frozenset()
        self.stages: dict[tuple[int, int], Stage] = {}
        self.posted: dict[tuple[int, int], int] = {}  # (operation, rank) -> variant, until they match
        self.waiting: dict[int, int] = {}
        self.over: frozenset[int] = frozenset()  # ranks whose end the controller knows
        self.returned: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()  # ranks that have not reported what they left behind
        self.left_open: frozenset[int] = frozenset()
        self.stopping = False
        self.verdict = ""
        self.torn = False

    def _receive(self, number: int) -> None:
        message, *later = self.up[number]
        self.up = put(self.up, number, tuple(later))
        match message:
            case ("Posted", int(operation), int(variant)):
                self._catch_up([number])
                self._judge_posted(number, operation, variant)
                self._judge_asks(number, operation)
            case ("Asks", int(operation), bool(waits)):
                self._catch_up(range(self.size))
                self._judge_asks(number, operation)
                if waits and not self.stopping and (operation, number) in self.posted:
                    self.waiting[number] = operation
                    self._check_deadlock()
            case ("Ended", str(how), tuple(withdrawn), bool(torn), bool(left_open)):
                self._ended(number, how, withdrawn, torn=torn, left_open=left_open)

    def _ended(self, number: int, how: str, withdrawn: tuple[int, ...], *, torn: bool, left_open: bool) -> None:
        self.over |= {number}
        self.torn |= torn
        self.left_open |= {number} if left_open else set()
        for operation in withdrawn:
            self.torn |= self._rule(number, operation, Notice.WITHDRAW) is Verb.TEAR
        if how == "returns":
            self.returned |= {number}
            self.waiting.pop(number, None)
            if self.posted or left_open:
                self._catch_up(sorted(self.over))
            if not self.stopping:
                self._check_deadlock()
        else:
            self._catch_up([number])
            self._stop()

    def _see_death(self, number: int) -> None:
        self._catch_up([number])
        self.over |= {number}
        self.lost |= {number}
        self._stop()

    def _raise_mismatch(self) -> None:
        self._catch_up(range(self.size))
        if not self.stopping:
            self._pronounce("mismatch")

    def _catch_up(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            entries, self.logs = self.logs[number], put(self.logs, number, ())
            for operation, variant in entries:
                self._judge_posted(number, operation, variant)

    def _judge_posted(self, number: int, operation: int, variant: int) -> None:
        if self.stopping:
            return
        self.waiting.pop(number, None)
        self._rule(number, operation, Notice.ANNOUNCE)
        self.posted[operation, number] = variant
        there = {rank: self.posted[operation, rank] for rank in range(self.size) if (operation, rank) in self.posted}
        if len(there) < self.size:
            return
        if len(set(there.values())) > 1:
            self._pronounce("mismatch")
            return
        for rank in there:
            del self.posted[operation, rank]
            if self.waiting.get(rank) == operation:
                del self.waiting[rank]
        stages = self._stages_of(operation)
        if Stage.REQUESTED in stages and may_grant(stages):
            self._grant(operation)
        else:
            for rank in range(self.size):
                self._rule(rank, operation, Notice.MATCH)

    def _judge_asks(self, number: int, operation: int) -> None:
        if self.stopping:
            return
        if self._rule(number, operation, Notice.REQUEST) is Verb.GRANT_ALL and may_grant(self._stages_of(operation)):
            self._grant(operation)

    def _grant(self, operation: int) -> None:
        for rank in range(self.size):
            if self._rule(rank, operation, Notice.GRANT) is Verb.SEND and rank not in self.dead:
                self.down = put(self.down, rank, (*self.down[rank], ("Grant", operation)))

    def _rule(self, number: int, operation: int, notice: Notice) -> Verb:
        stage = self.stages.get((number, operation), Stage.UNKNOWN)
        if (stage, notice) not in self.tables.controller:
            raise Broken(f"controller: no step for {notice!r} in the stage {stage!r}")
        ruling = self.tables.controller[stage, notice]
        self.stages[number, operation] = ruling.stage
        return ruling.verb

    def _stages_of(self, operation: int) -> list[Stage]:
        return [self.stages.get((rank, operation), Stage.UNKNOWN) for rank in range(self.size)]

    def _mismatched(self) -> bool:
        return any(
            variant != other and operation == place
            for (operation, _), variant in self.posted.items()
            for (place, _), other in self.posted.items()
        )

    def _check_deadlock(self) -> None:
        live = self.size - len(self.returned)
        if live and len(self.waiting) >= live:
            self._pronounce("mismatch" if self._mismatched() else "deadlock")

    def _pronounce(self, verdict: str) -> None:
        self.verdict = verdict
        self._stop()

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            for rank in range(self.size):
                if rank not in self.over and rank not in self.dead:
                    self.down = put(self.down, rank, (*self.down[rank], ("Refuse",)))


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """Return a tuple with another value at one index."""
    return (*values[:index], value, *values[index + 1 :])
