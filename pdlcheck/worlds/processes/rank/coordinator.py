"""A rank's engine for watched groups: it posts operations, and launches each one on the real group once it may go.

So the real group never gets operations that do not match; gloo ends the process when it gets them.

Ranks of one machine read on the board that all peers have posted matching operations, and launch them without the
controller. A rank looks at the board when it posts an operation, and while it waits for one. If a peer is still missing
after a while, the rank asks the controller, and notes this on the board. Then the controller grants the operation on
every rank, also on a rank that is busy with something else.

``agreement.py`` says when an operation goes. This file has the threads, the locks and the time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import torch.distributed as dist

from pdlcheck.operations.new_group import MEET
from pdlcheck.time_budgets import LONG_NAP_S, NAP_S
from pdlcheck.worlds.observe import Operation, Signature, refuse, validate_for_gloo
from pdlcheck.worlds.processes.exchange.agreement import Effect, Event
from pdlcheck.worlds.processes.exchange.board import Board
from pdlcheck.worlds.processes.exchange.meeting import Meetings
from pdlcheck.worlds.processes.exchange.messages import (
    Asks,
    Command,
    Grant,
    LogHalfFull,
    Posted,
    Refuse,
    Report,
    StopMatching,
)
from pdlcheck.worlds.processes.rank.coordinated_work import AnnouncedWork, note_set_order, own_error
from pdlcheck.worlds.processes.rank.ending import note_error
from pdlcheck.worlds.processes.rank.operation_states import OperationStates
from pdlcheck.worlds.processes.rank.reminders import Reminders

__all__ = ["GroupEngine", "OperationCoordinator"]

_AT_ONCE = 16  # number of oldest operations that are examined when another one is posted
_AT_MOST = 256  # the number at other times; with thousands pending, the controller is asked for some of them


class OperationCoordinator:
    """All watched operations of one rank process.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        send: function that sends a message to the controller.
        board: the shared board; None if the ranks share no memory.
    """

    def __init__(self, rank: int, world_size: int, send: Callable[[Report], None], board: Board | None) -> None:
        self.send = send
        self.call = 0
        self.is_torn = False  # a launched operation has failed, or some ranks may launch it and others never
        self.is_beginning = False  # the default group of the call is being made
        self.withdrawn: list[int] = []  # never launched here, although the controller may have granted them
        self.rank, self.world_size = rank, world_size
        self._states = OperationStates(rank, board)
        self.reminders = Reminders()
        self._meetings = Meetings(0)
        self._numbers = itertools.count(1)
        self._halves = 0  # number of filled log halves that were reported to the controller
        self._open: dict[int, AnnouncedWork] = {}  # not launched yet, in posting order
        self._launched: list[AnnouncedWork] = []  # kept alive until the data has moved, even if the user drops them
        self._look_through = 0  # with more launched operations than this, release the complete ones
        self._refusal: Exception | None = None
        self._refused_call = 0
        self._thread = 0
        self._launching = threading.Lock()  # held around each step; a thread that needs both locks takes this one first
        self._lock = threading.Lock()

    def begin(self, call: int) -> None:
        """Start a call, and discard the operations of earlier calls."""
        self.reminders.clear()
        for launched in self._launched:  # launched on all ranks; otherwise the processes would not be used again
            launched.finish()
        with self._lock:
            self.call = call
            self.is_torn = self.is_beginning = False
            self.withdrawn.clear()
            self._meetings = Meetings(call)
            self._open.clear()
            self._launched.clear()
            self._thread = self._halves = self._look_through = 0
            self._states.begin(call)
            if self._refused_call != call:  # equal if another rank failed before this one began
                self._refusal = None

    def end(self, *, failed: bool) -> None:
        """Finish the operations of a call whose function has ended.

        The other ranks launch the operations that this rank has launched, or the call is torn.

        Args:
            failed: True if the function raised an error; then its open operations are withdrawn.
        """
        self.advance(at_most=len(self._open))
        for launched in self._launched:
            self.tell_others(launched)
        if failed:
            for work in list(self._open.values()):
                self._withdraw(work)

    @property
    def verdict(self) -> Exception | None:
        """Return the error that stops all operations of this call; None if there is none."""
        return self._refusal if self._refused_call == self.call else None

    @property
    def has_open(self) -> bool:
        """Return whether this rank has posted operations that are not launched, and still may be."""
        return bool(self._open)

    def post(self, operation: Operation, real: Any) -> AnnouncedWork:
        """Announce an operation of the process group ``real``, and return its handle.

        If the controller has refused the operations of the call, raise a copy of its error.
        """
        work = AnnouncedWork(self, next(self._numbers), operation, real)
        thread = threading.get_ident()
        is_half_full = False
        if len(self._launched) > self._look_through:
            self._let_go()
        with self._lock:
            if self._refusal is not None:
                note_error()
                error = own_error(self._refusal, operation)
                note_set_order(error, operation)
                raise error
            self._open[work.number] = work
            meeting = self._meetings.of(operation.signature)  # call it in any case, because it counts messages
            halves = self._states.log(work.number, operation.signature)
            if halves is None:
                reports = self._states.take(work, Event.ANNOUNCE) is Effect.REPORT
            else:
                reports = False
                work.meet(meeting)
                self._states.show(work)
                is_half_full, self._halves = halves > self._halves, halves
            if meeting is None and operation.signature.is_p2p:
                self._states.open_to_all()
        if thread != self._thread:
            if self._thread:
                self.send(StopMatching(self.call))
            self._thread = thread
        if is_half_full:
            self.send(LogHalfFull(self.call, self._begun()))
        if work.meets and self._states.can_meet(operation.signature):
            with self._launching:
                self._states.take(work, Event.POST if operation.is_async else Event.POST_AND_WAIT)
            self.advance(at_most=_AT_ONCE)
            return work
        self.request_grant(work)
        if reports:
            self.send(Posted(self.call, work.number, operation.signature))
        return work

    def meet(self, signature: Signature) -> None:
        """Wait until every member has announced this signature; no data moves."""
        if self.is_beginning:
            signature = signature._replace(where="")
        self.post(Operation(signature, (), MEET, (), is_async=False), None).wait()

    def advance(self, around: AnnouncedWork | None = None, *, at_most: int = _AT_MOST, elsewhere: bool = False) -> None:
        """Launch every operation whose peers are ready, in posting order per channel.

        Args:
            around: operations that may have to be launched before this one are examined in any case.
            at_most: number of oldest operations that are examined.
            elsewhere: run user callbacks, and anything that may block on the controller, in a separate thread.
        """
        if not self._open:
            return
        launched: list[AnnouncedWork] = []
        held: set[object] = set()
        with self._launching:
            with self._lock:
                waiting = list(itertools.islice(self._open.values(), at_most))
                if around is not None and len(self._open) > at_most:
                    others = itertools.islice(self._open.values(), at_most, None)
                    waiting += [work for work in others if work.way_of_anybody == around.way_of_anybody]
            for work in waiting:
                if work.way in held or work.way_of_anybody in held or not self._states.may_go(work):
                    held.add(work.way)
                else:
                    self._launch(work)
                    launched.append(work)
        for work in launched:
            if elsewhere:
                work.settle_elsewhere()
            else:
                work.settle()
        if not elsewhere:
            self._resolve_doubts()
        elif self._states.in_doubt:
            self._resolve_doubts_elsewhere()

    def abandon(self, work: AnnouncedWork) -> bool:
        """Launch a message although the other rank has not come; return False if it is no longer open."""
        with self._launching:
            if work.number not in self._open:
                return False
            self._states.take(work, Event.ABANDON)
            self._launch(work)
            return True

    def look(self, work: AnnouncedWork, seconds: float) -> bool:
        """Look for some time whether an operation may be launched, and return whether it is decided.

        Args:
            work: the operation; if only the controller can decide about it, return False at once.
            seconds: how long to look.
        """
        if not work.meets or work.asked:
            return False
        with self._launching:
            if work.number in self._open:
                self._states.take(work, Event.WAIT)
        for _ in _looks(seconds):
            self.advance(work)
            if work.is_decided or work.asked:
                break
        return work.is_decided

    def request_grant(self, work: AnnouncedWork, *, waits: bool = False) -> None:
        """Ask the controller to grant an operation, unless it was asked already.

        Args:
            work: the operation.
            waits: True if this rank does nothing else until then.
        """
        for older in list(self._open.values()):  # the controller grants a channel's operations in the order of requests
            if older.number < work.number and not older.asked and older.way_of_anybody == work.way_of_anybody:
                self._ask(older, Event.ASK)
        self._ask(work, Event.ASK_AND_WAIT if waits else Event.ASK)

    def await_peers(self, work: AnnouncedWork, seconds: float) -> None:
        """Wait for ranks that are busy with something else to launch the operation too.

        If they have not done so after ``seconds``, ask the controller to grant the operation there.
        """
        for _ in _looks(seconds):
            if not self._states.others_are_busy(work):
                break
            self.advance()
        self.tell_others(work)

    def tell_others(self, work: AnnouncedWork) -> None:
        """Ask the controller to grant the operation on ranks that are busy with something else, if there are any."""
        if work.was_left:
            with self._launching:
                sends = work.was_left and self._states.tell(work)
            if sends:
                self.send(Asks(self.call, work.number, waits=False))

    def handle(self, message: Command) -> None:
        """Handle a message of the controller; runs in the control thread."""
        if isinstance(message, Grant):
            with self._launching:
                work = self._open.get(message.operation)
                if work is not None:
                    work.grant(message.source)
                    self._states.take(work, Event.GRANT)
            if work is not None:
                self.advance(work, at_most=0, elsewhere=True)
        elif isinstance(message, Refuse):
            if message.call == self.call:
                self.advance(at_most=len(self._open), elsewhere=True)
            with self._lock:
                self._refusal, self._refused_call = message.error, message.call
                refused = list(self._open.values()) if message.call == self.call else []
            for work in refused:
                self._withdraw(work)
                work.refuse(message.error)
                work.settle_elsewhere()

    # -- inside ------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Release the operations whose data has moved.

        No lock is held while MPI is asked, because that may run user callbacks.
        """
        moved = {launched.number for launched in list(self._launched) if launched.has_moved()}
        with self._lock:
            self._launched = [launched for launched in self._launched if launched.number not in moved]
            self._look_through = 2 * len(self._launched)

    def _begun(self) -> int:
        """Return the number of the first operation about which this rank may still have to ask; 0 if there is none."""
        with self._lock:
            asking = [*self._open, *(work.number for work in self._launched if work.was_left)]
        return min(asking, default=0)

    def _resolve_doubts(self) -> None:
        while True:
            try:
                work = self._states.in_doubt.popleft()
            except IndexError:  # none is left, or another thread has taken the last one
                return
            self._ask(work, Event.ASK)

    def _resolve_doubts_elsewhere(self) -> None:
        threading.Thread(target=self._resolve_doubts, name="pdlcheck doubts", daemon=True).start()

    def _ask(self, work: AnnouncedWork, event: Event) -> None:
        with self._launching, self._lock:
            if work.number not in self._open:
                return
            effect = self._states.ask(work, event)
        if effect is not Effect.NOTHING:
            self.send(Asks(self.call, work.number, waits=effect is Effect.REQUEST_AND_WAIT))
            self._resolve_doubts()

    def _launch(self, work: AnnouncedWork) -> None:
        with self._lock:
            del self._open[work.number]
            self._states.hide(work)
            self._launched.append(work)
        work.launch()

    def _withdraw(self, work: AnnouncedWork) -> None:
        """Record that this rank will never launch an operation.

        The call is torn if another rank may have launched it.
        """
        with self._launching, self._lock:
            if self._open.pop(work.number, None) is None:
                return
            self.withdrawn.append(work.number)
            self._states.hide(work)
            if self._states.withdraw(work):
                self.is_torn = True


def _looks(seconds: float) -> Iterator[None]:
    """Yield at once, and again after each nap, for this many seconds; the naps get longer."""
    until, nap = time.perf_counter() + seconds, NAP_S
    yield
    while time.perf_counter() < until:
        sleep(nap)
        yield
        nap = min(1.1 * nap, LONG_NAP_S)


class GroupEngine:
    """The engine of one watched group; it launches operations on the real group ``real``."""

    def __init__(self, coordinator: OperationCoordinator, real: Any) -> None:
        self._coordinator = coordinator
        self._real = real

    def post(self, operation: Operation) -> dist.Work:
        """Post an operation; see :class:`pdlcheck.worlds.observe.Engine`."""
        refuse(operation)
        validate_for_gloo(operation)
        return self._coordinator.post(operation, self._real)
