"""A rank's engine for watched groups: announce an operation, call the real group once it is granted.

The real group therefore never sees operations that do not fit together, which gloo answers by ending the
process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pdlcheck.errors import PeerFailed
from pdlcheck.worlds.processes.messages import Command, Grant, Posted, Refuse, Report, Unwatch, Waits
from pdlcheck.worlds.watch import Operation, Signature, WatchedWork

__all__ = ["AnnouncedWork", "Announcer", "GroupEngine"]

_PATIENCE_S = 0.001  # most grants arrive sooner, and then the controller need not hear of the wait


class Announcer:
    """All watched operations of one rank process.

    Args:
        send: takes messages for the controller.
    """

    def __init__(self, send: Callable[[Report], None]) -> None:
        self.send = send
        self.call = 0
        self._numbers = itertools.count(1)
        self._open: dict[int, AnnouncedWork] = {}
        self._launched: list[AnnouncedWork] = []  # kept alive until the data has moved, even if the user drops them
        self._refusal: Exception | None = None
        self._refused_call = 0
        self._thread = 0
        self._lock = threading.Lock()

    def begin(self, call: int) -> None:
        """A call starts; nothing of an earlier one is left."""
        with self._lock:
            self.call = call
            self._open.clear()
            self._launched.clear()
            self._thread = 0
            if self._refused_call != call:  # else another rank failed before this one began
                self._refusal = None

    def post(self, operation: Operation, real: Any) -> AnnouncedWork:
        """Announce an operation for the process group ``real``."""
        work = AnnouncedWork(self, next(self._numbers), operation, real)
        thread = threading.get_ident()
        with self._lock:
            if self._refusal is not None:
                raise _own(self._refusal, operation)
            self._open[work.number] = work
            self._launched = [launched for launched in self._launched if not launched.has_moved()]
        if thread != self._thread:
            if self._thread:
                self.send(Unwatch(self.call))
            self._thread = thread
        self.send(Posted(self.call, work.number, operation.signature))
        return work

    def meet(self, signature: Signature) -> None:
        """Wait until every member has announced this, without data."""
        self.post(Operation(signature, (), "", ()), None).wait()

    def handle(self, message: Command) -> None:
        """A message of the controller; runs in the control thread."""
        if isinstance(message, Grant):
            with self._lock:
                work = self._open.pop(message.operation, None)
                if work is not None:
                    self._launched.append(work)
            if work is not None:
                work.launch(message.source)
        elif isinstance(message, Refuse):
            with self._lock:
                self._refusal, self._refused_call = message.error, message.call
                refused = list(self._open.values()) if message.call == self.call else []
                self._open.clear()
            for work in refused:
                work.refuse(message.error)


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
        self._decided = threading.Event()
        self._resolving = threading.Lock()

    # -- from the control thread -------------------------------------------------------------------

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
                self._real = getattr(self._group, method)(*args)
        except Exception as error:  # what the real group refuses, the waiting rank raises
            self._error = error
        self._decided.set()
        self._settle_future()

    def refuse(self, error: Exception) -> None:
        """The operation will never go."""
        self._error = _own(error, self._operation)
        self._decided.set()
        self._settle_future()

    def has_moved(self) -> bool:
        """True once the tensors are no longer used."""
        return self._decided.is_set() and (self._real is None or self._real.is_completed())

    # -- what torch and users call -----------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        self._await_decision(timeout)
        if self._error is not None:
            raise self._error
        if self._real is None:
            return True
        try:
            done = self._real.wait(timeout) if _is_limit(timeout) else self._real.wait()
        except Exception as error:
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
        if self._decided.wait(_PATIENCE_S):
            return
        self._announcer.send(Waits(self._announcer.call, self.number))
        if not self._decided.wait(timeout.total_seconds() if _is_limit(timeout) else None):
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s in {self._operation.signature}")

    def _settle_future(self) -> None:
        """See to it that the future, if one was asked for, is resolved although nobody may wait."""
        if self._future is None:
            return
        if self._error is not None:
            self._resolve(self._error)
            return
        try:
            self._real.get_future().add_done_callback(lambda _: self._resolve())
        except RuntimeError:  # gloo's sends and receives have no future: resolved by wait
            return

    def _resolve(self, error: Exception | None = None) -> None:
        future = self._future
        if future is None:
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
