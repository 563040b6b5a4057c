"""The collection of one call's outcomes: wait for every rank, find the first cause, leave no rank hanging."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pdlcheck.errors import PdlcheckError, PeerFailed, RankFailed
from pdlcheck.time_budgets import HESITATION_S, INTERRUPT_S, LOOK_S, REPORTS_S, SILENT_S, STACKS_S
from pdlcheck.worlds.outcome import Outcome, Raised, Returned, Stopped, severity, stopped_by_nobody
from pdlcheck.worlds.processes.controller.arbiter import Arbiter
from pdlcheck.worlds.processes.controller.rank_handle import Died, Member
from pdlcheck.worlds.processes.exchange.board import Board
from pdlcheck.worlds.processes.exchange.messages import (
    Aftermath,
    Asks,
    Done,
    Failed,
    Grant,
    Halted,
    LogHalfFull,
    Posted,
    Refuse,
    Report,
    Stack,
    Stop,
    StopMatching,
    WhereAreYou,
)
from pdlcheck.worlds.processes.exchange.own_time import OwnTime
from pdlcheck.worlds.processes.exchange.unpickling import Unreadable, load_sent
from pdlcheck.worlds.processes.rank.server import STACK_SIGNAL
from pdlcheck.worlds.rank_reports import rank_died, rank_interrupt, rank_timeout, take_stack

__all__ = ["Collector"]

_CONSEQUENCE = 1_000_000  # "connection closed by peer" is never the first cause if there is another failure

Events = Sequence[tuple[Member, Report | Died]]


class Collector:
    """A collector of the outcomes of one call.

    Args:
        members: all ranks.
        call: the number of the call.
        wait: waits until something happens, at most the given seconds; returns the events.
        arbiter: the judge of watched operations; None if operations are not watched.
        board: shared memory where ranks log their operations; None if they send them as messages.
        timeout_s: the time limit of the whole call.
        debugged: a rank that is not told to stop, and is waited for, after a failure of another rank.
    """

    def __init__(
        self,
        members: Sequence[Member],
        call: int,
        wait: Callable[[float], Events],
        arbiter: Arbiter | None,
        board: Board | None,
        timeout_s: float,
        debugged: int | None = None,
    ) -> None:
        self._members = members
        self._call = call
        self._wait = wait
        self._arbiter = arbiter
        self._board = board
        self._timeout_s = timeout_s
        self._debugged = debugged
        self._pending = {member.rank: member for member in members}
        self._outcomes: dict[int, Outcome] = {}
        self._failures = 0
        self._verdict: PdlcheckError | None = None
        self._stopping = False
        self._refusing = False  # the pending ranks get no further grants
        self._until = time.monotonic() + timeout_s
        self._after: dict[int, Aftermath] = {}
        self._heard: dict[int, bytes] = {}
        self._told: dict[int, OwnTime] = {}  # since the last message of a rank that was told to stop
        self._hesitating: dict[int, OwnTime] | None = None  # since a mismatch was found

    def outcomes(self) -> list[Outcome]:
        """Wait until every rank has ended the call, in one way or another; return the outcomes in rank order."""
        for member in self._members:
            if member.died is not None:  # after its report of the last call; no further event comes of it
                self._take(member, member.died)
        while self._pending:
            left = self._until - time.monotonic()
            look = LOOK_S if self._stopping else math.inf
            events = self._wait(max(min(left, look, self._patience()), 0.0))
            if not events and left <= 0 and not self._stopping:
                self._time_out()
                break
            for member, report in events:
                self._take(member, report)
            if self._patience() <= 0:
                self._raise_mismatch()
            if self._stopping:
                self._give_up_silent()
                if time.monotonic() >= self._until:
                    break
        for rank in list(self._pending):
            self._end(rank, Stopped(rank, self._waits_in(rank)))
        if self._verdict is not None:
            self._pronounce(self._verdict)
        if any(not isinstance(outcome, Returned) for outcome in self._outcomes.values()):
            self._catch_up(range(len(self._members)))
        return [self._with_last(self._outcomes[member.rank]) for member in self._members]

    def can_go_on(self) -> bool:
        """Return whether, after :meth:`outcomes`, another call can run on the same processes.

        After a failure, plain groups may hold half of an operation, unless all ranks skipped alike. In watched groups,
        every operation that began on one rank began on all ranks. The exceptions are a rank that failed while its
        operation was granted, and a rank that had returned before. A rank that ran out of memory may do so again.
        """
        after = list(self._after.values())
        return (
            len(after) == len(self._members)
            and not (self._arbiter is not None and self._arbiter.is_torn)
            and not (self._refusing and any(left.left_open for left in after))
            and all(left.default_group for left in after)
            and len({left.groups_made for left in after}) == 1
            and (self._arbiter is not None or not self._refusing or self._skipped_alike())
            and not any(isinstance(o, Raised) and isinstance(o.error, MemoryError) for o in self._outcomes.values())
        )

    def _skipped_alike(self) -> bool:
        errors = [outcome.error for outcome in self._outcomes.values() if isinstance(outcome, Raised)]
        return len(errors) == len(self._members) and all(map(severity, errors)) and len({*map(str, errors)}) == 1

    def can_be_ended(self) -> bool:
        """Return whether, after :meth:`outcomes`, every rank is idle and can tear down what it has set up."""
        failed = any(isinstance(outcome, Raised) and not severity(outcome.error) for outcome in self._outcomes.values())
        return len(self._after) == len(self._members) and (self._arbiter is not None or not failed)

    def heard(self) -> list[bytes]:
        """Return the warnings of the ranks that have returned, in rank order; see ``warning_relay.py``."""
        return [self._heard[rank] for rank in sorted(self._heard)]

    def groups(self) -> int:
        """Return the number of process groups that the ranks have, including the default group."""
        return max((left.groups for left in self._after.values()), default=0)

    def _with_last(self, outcome: Outcome) -> Outcome:
        return replace(outcome, last=self._arbiter.last_operation(outcome.rank)) if self._arbiter else outcome

    def _take(self, member: Member, report: Report | Died) -> None:
        rank = member.rank
        if rank not in self._pending or getattr(report, "call", self._call) != self._call:
            return
        if rank in self._told:
            self._told[rank] = member.own_time()
        after = getattr(report, "after", None)
        if after is not None:
            self._after[rank] = after
            if self._arbiter is not None:
                self._arbiter.withdrew(rank, after.withdrawn)
        if isinstance(report, Failed | Died):
            self._catch_up([rank])
        match report:
            case Done(payload=payload, heard=heard):
                self._heard[rank] = heard
                self._returned(rank, payload)
            case Failed():
                self._failed(rank, report)
            case Died():
                out, err = member.output()
                last = self._arbiter.last_operation(rank) if self._arbiter is not None else ""
                self._raised(rank, rank_died(rank, report, last, err), output=out)
            case Halted(where=where) if self._stopping or self._refusing:
                self._end(rank, Stopped(rank, self._waits_in(rank) or where))
            case Halted(where=where):
                self._raised(rank, stopped_by_nobody(rank, where))
            case Posted(operation=operation, signature=signature):
                self._catch_up([rank])  # messages match in the order in which they were posted
                self._posted(rank, operation, signature)
                self._judge(lambda arbiter: self._grant(arbiter.asks(rank, operation)))
            case LogHalfFull(begun=begun):
                self._catch_up(range(len(self._members)))
                self._judge(lambda arbiter: arbiter.forget(rank, begun))
            case Asks(operation=operation, waits=waits):
                self._catch_up(range(len(self._members)))  # others may have posted it without asking
                self._judge(lambda arbiter: self._grant(arbiter.asks(rank, operation)))
                if waits:
                    self._judge(lambda arbiter: arbiter.waits(rank, operation))
            case StopMatching():
                self._judge(lambda arbiter: arbiter.unwatch())

    def _catch_up(self, ranks: Iterable[int]) -> None:
        """Read the operations that these ranks have posted since the last time.

        Before a judgement, the log of every rank that asked for a grant or ended is read. So the verdict rests on
        complete information.
        """
        if self._board is None or self._arbiter is None:
            return
        for rank in ranks:
            for operation, signature in self._board.take(rank, self._call):
                self._posted(rank, operation, signature)

    def _patience(self) -> float:
        """Return for how long the arbiter may still hesitate, so that each rank has time to report what it posts."""
        if self._arbiter is None or not self._arbiter.has_open_mismatch or self._refusing:
            return math.inf
        if self._hesitating is None:
            self._hesitating = {rank: member.own_time() for rank, member in self._pending.items()}
        left = [HESITATION_S - own.spent() for rank, own in self._hesitating.items() if rank in self._pending]
        return max(left, default=0.0)

    def _raise_mismatch(self) -> None:
        self._catch_up(range(len(self._members)))
        self._judge(lambda arbiter: arbiter.raise_mismatch())

    def _posted(self, rank: int, operation: int, signature: Any) -> None:
        if self._arbiter is not None:
            self._arbiter.record(rank, signature)
            self._judge(lambda arbiter: self._grant(arbiter.posted(rank, operation, signature)))

    def _grant(self, grants: Sequence[tuple[int, Grant]]) -> None:
        for rank, grant in grants:
            self._members[rank].send(grant)

    def _returned(self, rank: int, payload: bytes) -> None:
        try:
            value = load_sent(payload)
        except Unreadable as error:
            trouble = TypeError(
                f"the result of rank {rank} cannot be read by the controller: {error}; "
                "return tensors, numbers, strings, or containers of these"
            )
            self._raised(rank, trouble)
            return
        self._end(rank, Returned(rank, value))
        # An operation that its rank has left open may mismatch, although no rank has waited for it.
        if self._arbiter is not None and (self._arbiter.has_open or self._after[rank].left_open):
            self._catch_up(list(self._outcomes))
        self._judge(lambda arbiter: arbiter.ended(rank))

    def _failed(self, rank: int, report: Failed) -> None:
        error: BaseException | None = None
        if report.error is not None:
            with suppress(Unreadable):  # its class cannot be imported here; the text below describes the error
                error = load_sent(report.error)
        if error is None:
            text = f"rank {rank} raised {report.kind}: {report.text}"
            error = RankFailed(text, rank=rank, traceback=report.traceback)
        self._raised(rank, error, traceback=report.traceback, site=report.site, consequence=report.consequence)

    def _raised(
        self,
        rank: int,
        error: BaseException,
        *,
        traceback: str = "",
        output: str = "",
        site: str = "",
        consequence: bool = False,
    ) -> None:
        self._failures += 1
        order = self._failures + (_CONSEQUENCE if consequence else 0)
        self._end(rank, Raised(rank, error, traceback, order, output, site=site, consequence=consequence))
        if not self._stopping and self._arbiter is not None and self._arbiter.has_open_mismatch and not severity(error):
            self._raise_mismatch()
        if self._stopping:
            return
        reason = PeerFailed("another rank failed")
        if severity(error) and self._arbiter is not None:  # a skip; other ranks may still fail, which counts more
            self._refuse_others(reason)
        else:
            self._stop_others(reason)

    def _end(self, rank: int, outcome: Outcome) -> None:
        self._outcomes[rank] = outcome
        self._pending.pop(rank, None)
        if self._stopping and rank == self._debugged:
            self._until = time.monotonic() + REPORTS_S

    def _waits_in(self, rank: int) -> str:
        return self._arbiter.waits_in(rank) if self._arbiter is not None else ""

    # -- ends ahead of time ------------------------------------------------------------------------

    def _judge(self, ask: Callable[[Arbiter], None]) -> None:
        if self._arbiter is None or self._stopping or self._refusing:
            return
        try:
            ask(self._arbiter)
        except PdlcheckError as verdict:
            self._verdict = verdict
            self._stop_others(verdict)  # each rank raises it from its own line

    def _pronounce(self, verdict: PdlcheckError) -> None:
        """Add the verdict to the outcomes if no rank has raised it: ranks may swallow it, or raise it too late."""
        if not any(isinstance(o, Raised) and type(o.error) is type(verdict) for o in self._outcomes.values()):
            rank = self._members[0].rank
            self._outcomes[rank] = Raised(rank, verdict)

    def _stop_others(self, reason: PdlcheckError) -> None:
        self._stopping = True
        limit = self._timeout_s if self._debugged in self._pending else REPORTS_S
        self._until = max(self._until, time.monotonic() + limit)
        self._refuse_others(reason)
        for rank, member in self._pending.items():
            if rank != self._debugged:
                member.send(Stop(self._call))
                self._told[rank] = member.own_time()

    def _give_up_silent(self) -> None:
        """End the ranks that were told to stop and report nothing.

        They are stopped, or C code keeps Python from running. A rank that can run Python answers again and again,
        however loaded the machine is.
        """
        for rank, own in self._told.items():
            member = self._pending.get(rank)
            if member is not None and (own.spent() >= SILENT_S or (own.spent() >= LOOK_S and member.is_stopped())):
                self._end(rank, Stopped(rank, self._waits_in(rank)))

    def _refuse_others(self, reason: PdlcheckError) -> None:
        """End the ranks that are about to wait for another rank; unwatched ranks cannot be reached."""
        self._refusing = True
        if self._arbiter is not None:
            for member in self._pending.values():
                member.send(Refuse(self._call, reason))

    def interrupted(self) -> str:
        """Return in words where each rank is when the user presses Ctrl-C.

        This takes less than a second, or two on a loaded machine. No other method may be called afterwards.
        """
        late = dict(self._pending)
        states, _, _ = self._look_at(late, signals=False, at_most=INTERRUPT_S)
        return rank_interrupt(states, late)

    def _time_out(self) -> None:
        late = dict(self._pending)
        states, stacks, said = self._look_at(late)
        error = rank_timeout(self._timeout_s, states, {rank: stacks.get(rank, "") for rank in late})
        rank = min(late)
        self._stopping = True
        self._end(rank, Raised(rank, error, output=said))  # even if the rank has ended a moment later

    def _look_at(
        self, late: Mapping[int, Member], *, signals: bool = True, at_most: float = REPORTS_S
    ) -> tuple[dict[int, str], dict[int, str], str]:
        """Return where every rank is in words, the stacks of the ``late`` ranks, and the output written meanwhile.

        If a rank does not answer, only a signal gets its stack. ``signals`` allows this, although it wakes the rank up.
        """
        places: dict[int, Stack] = {}
        for member in late.values():
            member.send(WhereAreYou(self._call))
        self._listen_for_stacks(places, late, STACKS_S, at_most)
        stacks = {rank: place.stack for rank, place in places.items()}
        states: dict[int, str] = {}
        said = ""
        silent = {rank: member for rank, member in late.items() if rank in self._pending and rank not in stacks}
        if silent:  # stopped, or C code keeps Python from running; faulthandler needs no Python
            if signals:
                for member in silent.values():
                    member.signal(STACK_SIGNAL)
                # The signal may interrupt a system call: a rank that answers only now may be about to return.
                self._listen_for_stacks(places, silent, STACKS_S / 2, at_most, to_the_end=True)
            for rank, member in silent.items():
                out, err = member.output()
                rest, stacks[rank] = take_stack(err)
                said += out + rest
                states[rank] = "stopped by SIGSTOP or SIGTSTP" if member.is_stopped() else "busy outside Python"
        self._catch_up(range(len(self._members)))
        for rank in range(len(self._members)):
            states[rank] = self._words(rank, places, states.get(rank, "busy"))
            if rank in late and rank not in self._pending:
                states[rank] += ", too late"
            states[rank] += self._last_words(rank)
        return states, stacks, said

    def _listen_for_stacks(
        self,
        places: dict[int, Stack],
        asked: Mapping[int, Member],
        own_s: float,
        at_most: float,
        *,
        to_the_end: bool = False,
    ) -> None:
        """Wait until each of the ``asked`` ranks has answered, or has had ``own_s`` of its own time to do so.

        With ``to_the_end``, wait for the end of the call instead of an answer.
        """
        until = time.monotonic() + at_most
        own = {rank: member.own_time() for rank, member in asked.items()}
        while (left := until - time.monotonic()) > 0:
            waited_for = [rank for rank in own if rank in self._pending and (to_the_end or rank not in places)]
            if all(own[rank].spent() >= own_s for rank in waited_for):
                break
            for member, report in self._wait(min(left, LOOK_S)):
                if isinstance(report, Stack) and report.call == self._call:
                    places[member.rank] = report
                else:
                    self._take(member, report)

    def _last_words(self, rank: int) -> str:
        """Return the last operation of a rank, as a part of a message; empty if the rank waits in an operation."""
        last = self._arbiter.last_operation(rank) if self._arbiter is not None else ""
        return f"; last operation {last}" if last and not self._waits_in(rank) else ""

    def _words(self, rank: int, places: dict[int, Stack], state: str) -> str:
        match self._outcomes.get(rank):
            case Returned():
                return "has returned"
            case Raised(error=error):
                return f"raised {type(error).__name__}"
        where = self._waits_in(rank) or (places[rank].where if rank in places else "")
        return f"{state} {where}".rstrip()
