"""A rank's engine for watched groups: post an operation, call the real group once it is clear that it may go.

The real group therefore never sees operations that do not fit together, which gloo answers by ending the process.

Ranks of one machine see on the board that all are there and fit, and go on by themselves. Whoever does not see that
soon asks the controller, and says so on the board; then the others ask it too. A rank asks at once as long as it has an
older operation that is not under way, as the operations of a group must start in one order on all ranks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.errors import PeerFailed
from pdlcheck.worlds.processes.board import ASKS, GOES, POSTED, Board
from pdlcheck.worlds.processes.meeting import Meeting, Meetings
from pdlcheck.worlds.processes.messages import (
    Asks,
    Command,
    Grant,
    HalfFull,
    Posted,
    Refuse,
    Report,
    Unwatch,
)
from pdlcheck.worlds.watch import Operation, Signature, WatchedWork

__all__ = ["AnnouncedWork", "Announcer", "GroupEngine"]

_PATIENCE_S = 0.001  # most ranks arrive sooner, and most grants: then the controller need not hear of the wait
_GLANCE_S = 0.0002  # of a caller that has something else to do
_NAP_S = 0.00002  # between two looks; to give the core away by sched_yield takes more of it from gloo's threads
_LOOK_S = 0.05  # at most, once the controller was asked


class Announcer:
    """All watched operations of one rank process.

    Args:
        rank: the own one.
        send: takes messages for the controller.
        board: None where the ranks share no memory.
    """

    def __init__(self, rank: int, send: Callable[[Report], None], board: Board | None) -> None:
        self.send = send
        self.call = 0
        self.is_torn = False  # an operation under way has failed in this call: connections may be closed
        self._rank = rank
        self._board = board
        self._meetings = Meetings(0)
        self._numbers = itertools.count(1)
        self._halves = 0  # of the log, that the controller was told of
        self._open: dict[int, AnnouncedWork] = {}  # not under way yet
        self._launched: list[AnnouncedWork] = []  # kept alive until the data has moved, even if the user drops them
        self._refusal: Exception | None = None
        self._refused_call = 0
        self._thread = 0
        self._lock = threading.Lock()

    def begin(self, call: int) -> None:
        """A call starts; nothing of an earlier one is left."""
        with self._lock:
            self.call = call
            self.is_torn = False
            self._meetings = Meetings(call)
            self._open.clear()
            self._launched.clear()
            self._thread = self._halves = 0
            if self._board is not None:
                self._board.clear(self._rank, call)
            if self._refused_call != call:  # else another rank failed before this one began
                self._refusal = None

    def post(self, operation: Operation, real: Any) -> AnnouncedWork:
        """Announce an operation for the process group ``real``."""
        work = AnnouncedWork(self, next(self._numbers), operation, real)
        thread = threading.get_ident()
        is_half_full = False
        with self._lock:
            if self._refusal is not None:
                raise _own(self._refusal, operation)
            behind = list(self._open.values())
            self._open[work.number] = work
            if self._launched:
                self._launched = [launched for launched in self._launched if not launched.has_moved()]
            meeting = self._meetings.of(operation.signature)  # it counts, also where it is of no use
            halves = self._log(work.number, operation.signature)
            if halves is None:
                work.asked = True
            else:
                work.meeting = meeting
                is_half_full, self._halves = halves > self._halves, halves
        if thread != self._thread:
            if self._thread:
                self.send(Unwatch(self.call))
            self._thread = thread
        for older in behind:
            self.ask(older)
        if is_half_full:
            self.send(HalfFull(self.call))
        if work.asked:
            self.send(Posted(self.call, work.number, operation.signature))
        elif work.meeting is None or behind:
            self.ask(work)
        else:
            self._say(work.meeting, POSTED)
            if operation.is_async and not self.look(work, _GLANCE_S):
                self.ask(work)
        return work

    def meet(self, signature: Signature) -> None:
        """Wait until every member has announced this, without data."""
        self.post(Operation(signature, (), "", (), is_async=False), None).wait()

    def look(self, work: AnnouncedWork, seconds: float) -> bool:
        """For so long, look whether all ranks of an operation are there; launch it and return True if so."""
        if work.meeting is None or work.asked or self._board is None:
            return False
        digest, others = work.meeting
        until = time.perf_counter() + seconds
        while True:
            states = self._board.states(others, digest)
            if ASKS in states:
                return False
            if 0 not in states:
                self._say(work.meeting, GOES)
                if self._launch(work, work.peer):
                    work.settle()
                return True
            if time.perf_counter() > until:
                return False
            time.sleep(_NAP_S)

    def look_again(self, work: AnnouncedWork) -> None:
        """Launch an operation that another rank has seen complete, a moment before this one asked the controller."""
        if work.meeting is not None and self._board is not None:
            digest, others = work.meeting
            if GOES in self._board.states(others, digest) and self._launch(work, work.peer):
                work.settle()

    def ask(self, work: AnnouncedWork, *, waits: bool = False) -> None:
        """Have the controller say when an operation may go, unless that is known."""
        with self._lock:
            if work.number not in self._open or (work.asked and not waits):
                return
            work.asked = True
        if work.meeting is not None:
            self._say(work.meeting, ASKS)
        self.send(Asks(self.call, work.number, waits))

    def handle(self, message: Command) -> None:
        """A message of the controller; runs in the control thread."""
        if isinstance(message, Grant):
            work = self._open.get(message.operation)
            if work is not None and self._launch(work, message.source):
                work.settle_elsewhere()
        elif isinstance(message, Refuse):
            with self._lock:
                self._refusal, self._refused_call = message.error, message.call
                of_this_call = message.call == self.call
                refused = [w for w in self._open.values() if not w.is_under_way] if of_this_call else []
                self._open.clear()
            for work in refused:
                work.refuse(message.error)
                work.settle_elsewhere()

    # -- inside ------------------------------------------------------------------------------------

    def _log(self, number: int, signature: Signature) -> int | None:
        return self._board.log(self._rank, (number, signature)) if self._board is not None else None

    def _say(self, meeting: Meeting, state: int) -> None:
        assert self._board is not None
        self._board.say(self._rank, meeting.digest, state)

    def _launch(self, work: AnnouncedWork, source: int) -> bool:
        """Once, though the board and the controller may both let it go; True if this was it."""
        with self._lock:
            if work.is_under_way or work.number not in self._open:
                return False
            work.is_under_way = True
        work.launch(source)
        with self._lock:
            if self._open.pop(work.number, None) is not None:
                self._launched.append(work)
        return True


class GroupEngine:
    """The engine of one watched group: its operations go to ``real``."""

    def __init__(self, announcer: Announcer, real: Any) -> None:
        self._announcer = announcer
        self._real = real

    def post(self, operation: Operation) -> dist.Work:
        """See :class:`pdlcheck.worlds.watch.Engine`."""
        return self._announcer.post(operation, self._real)


class AnnouncedWork(WatchedWork):
    """The handle of an operation that is announced, later launched, at last complete."""

    def __init__(self, announcer: Announcer, number: int, operation: Operation, real: Any) -> None:
        super().__init__(operation)
        self.number = number
        self._announcer = announcer
        self._group = real
        self._real: Any = None  # the work of the real group
        self._error: Exception | None = None
        self.meeting: Meeting | None = None
        self.asked = False  # the controller decides
        self.is_under_way = False
        self._decided = threading.Event()
        self._resolving = threading.Lock()

    # -- from the announcer ------------------------------------------------------------------------

    @property
    def peer(self) -> int:
        """Global rank that a message comes from, if it is known from the start; else -1."""
        signature = self._operation.signature
        return signature.peer if signature.op == "recv" else -1

    def launch(self, source: int) -> None:
        """Make the call on the real group; ``source`` is the global rank a message comes from, else -1."""
        operation = self._operation
        method, args = operation.method, operation.args
        if source >= 0:
            self._source = operation.signature.members.index(source)
        if method == "recv_anysource":  # the controller has chosen the source
            tensors, tag = args
            method, args = "recv", (tensors, self._source, tag)
        try:
            if self._group is not None:
                with torch.no_grad():  # C++ calls a group below autograd; from here it would see views of outputs
                    self._real = getattr(self._group, method)(*args)
        except Exception as error:  # what the real group refuses, the waiting rank raises
            self._error = error
        self._decided.set()

    def refuse(self, error: Exception) -> None:
        """The operation will never go."""
        self._error = _own(error, self._operation)
        self._decided.set()

    def settle(self) -> None:
        """See to it that the future, if one was asked for, is resolved although nobody may wait.

        What users have put behind it may run here and now, and wait for other operations.
        """
        if self._future is not None:
            self._settle_future()

    def settle_elsewhere(self) -> None:
        """As :meth:`settle`, for the control thread, whose messages such operations need."""
        if self._future is not None:
            threading.Thread(target=self._settle_future, name="pdlcheck future", daemon=True).start()

    def has_moved(self) -> bool:
        """True once the tensors are no longer used."""
        return self._decided.is_set() and (self._real is None or self._real.is_completed())

    # -- what torch and users call -----------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        if not self._decided.is_set():
            self._await_decision(timeout)
        if self._error is not None:
            raise self._error
        if self._real is None:
            return True
        try:
            done = self._real.wait(timeout) if _is_limit(timeout) else self._real.wait()
        except Exception as error:
            self._announcer.is_torn = True
            self._resolve(error)
            raise
        self._resolve()
        return bool(done)

    def is_completed(self) -> bool:
        return self.has_moved()

    def is_success(self) -> bool:
        return self.has_moved() and self._error is None

    def exception(self) -> Any:
        return self._error

    # -- inside ------------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        return self._decided.is_set()

    def _await_decision(self, timeout: Any) -> None:
        if self._announcer.look(self, _PATIENCE_S) or (self.asked and self._decided.wait(_PATIENCE_S)):
            return
        self._announcer.ask(self, waits=True)
        left = timeout.total_seconds() if _is_limit(timeout) else float("inf")
        pause = _PATIENCE_S
        while not self._decided.wait(min(pause, left)):
            self._announcer.look_again(self)
            left -= pause
            if left <= 0:
                raise RuntimeError(f"timed out after {timeout.total_seconds():g} s in {self._operation.signature}")
            pause = min(2 * pause, _LOOK_S)

    def _settle_future(self) -> None:
        if self._error is not None:
            self._resolve(self._error)
            return
        try:
            self._real.get_future().add_done_callback(lambda _: self._resolve())
        except RuntimeError:  # gloo's sends and receives have no future: resolved by wait
            return

    def _resolve(self, error: Exception | None = None) -> None:
        future = self._future
        if future is None or future.done():
            return
        with self._resolving:
            if future.done():
                return
            if error is None:
                future.set_result(self.result())
            else:
                future.set_exception(error if not isinstance(error, PeerFailed) else RuntimeError(str(error)))


def _own(error: Exception, operation: Operation) -> Exception:
    """A copy for one place to raise; that of a failed peer says where this rank was stopped."""
    return PeerFailed(f"in {operation.signature}") if isinstance(error, PeerFailed) else copy(error)


def _is_limit(timeout: Any) -> bool:
    """torch passes a zero timeout for none."""
    return isinstance(timeout, timedelta) and timeout > timedelta(0)
