"""The handle of an operation that is first announced, later launched, and finally complete."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from pdlcheck.compat.torch.autograd import graph_task_id
from pdlcheck.errors import CollectiveMismatch, PeerFailed
from pdlcheck.time_budgets import GRANT_S, LONGEST_PAUSE_S, PATIENCE_S, UNDER_WAY_S
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.observe import Operation, Signature, WatchedWork, is_limit, refuse_future, uncounted
from pdlcheck.worlds.observe.set_loops import loop_of_post
from pdlcheck.worlds.processes.exchange.agreement import State
from pdlcheck.worlds.processes.exchange.meeting import Meeting
from pdlcheck.worlds.processes.rank.ending import note_error
from pdlcheck.worlds.processes.rank.on_stream import OnStream

if TYPE_CHECKING:
    from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator

__all__ = ["AnnouncedWork", "note_set_order", "own_error"]

_UNDER_WAY = timedelta(seconds=UNDER_WAY_S)


@uncompiled
class AnnouncedWork(WatchedWork):
    """The handle that :class:`OperationCoordinator` returns for an operation."""

    def __init__(self, coordinator: OperationCoordinator, number: int, operation: Operation, real: Any) -> None:
        super().__init__(operation)
        self.number = number
        self.state = State.NEW
        self.meeting: Meeting | None = None
        self.meets = False  # the operation has a word on the board
        self.granted: int | None = None  # the source in the controller's grant; see `grant`
        self.way = _way(operation.signature, -1)  # operations with the same way are launched in posting order
        self.way_of_anybody = self.way if operation.signature.op != "recv" else (*self.way[:2], -1, *self.way[3:])
        self.is_decided = False  # it was launched, or it never will be
        self._coordinator = coordinator
        self._group = real
        self._real: Any = None  # the work of the real group
        self._error: Exception | None = None
        self._decided = threading.Lock()
        self._decided.acquire()
        self._resolving = threading.Lock()
        self._resolver = 0  # the thread that runs the user's callbacks; the operation is complete for it

    # -- for the coordinator -------------------------------------------------------------------------

    @property
    def asked(self) -> bool:
        """Return whether the controller decides when the operation is launched."""
        return self.state is State.ASKED

    @property
    def was_left(self) -> bool:
        """Return whether another rank was busy with something else when this one launched the operation."""
        return self.state is State.LEFT

    def meet(self, meeting: Meeting | None) -> None:
        """Record the operation's place on the board."""
        self.meeting = meeting
        self.meets = meeting is not None and bool(meeting.digest)

    def grant(self, source: int) -> None:
        """Record the controller's grant; ``source`` is the global rank that sends the message, or -1."""
        self.granted = source
        self.way = _way(self.operation.signature, source)

    def launch(self) -> None:
        """Make the call on the real group; the waiting rank raises its error."""
        signature = self.operation.signature
        method, args = self.operation.method.name, self.operation.args
        source = self.granted if self.granted is not None and self.granted >= 0 else signature.peer
        if signature.op == "recv":
            self._source = signature.members.index(source)
        if method == "recv_anysource":  # the controller has chosen the source
            tensors, tag = args
            method, args = "recv", (tensors, self._source, tag)
        try:
            if self._group is not None:
                with torch.no_grad(), uncounted():  # as C++ does: autograd would see views of outputs
                    self._real = getattr(self._group, method)(*args)
        except Exception as error:  # the waiting rank raises it
            self._error = self._noted(error)
        self._decide()

    def refuse(self, error: Exception) -> None:
        """Record that the operation will never be launched, and why; no effect if it is decided already."""
        if not self.is_decided:
            self._error = own_error(error, self.operation)
            self._decide()

    def settle(self) -> None:
        """Make sure that the future, if the user has asked for one, is resolved even if no rank waits.

        The user's callbacks may run in this call, and may wait for other operations.
        """
        if self._future is not None:
            self._settle_future()

    def settle_elsewhere(self) -> None:
        """Do the same as :meth:`settle`, in a thread of its own.

        The control thread calls this, because the user's callbacks may wait for messages that it handles.
        """
        if self._future is not None:
            threading.Thread(target=self._settle_future, name="pdlcheck future", daemon=True).start()

    def has_moved(self) -> bool:
        """Return whether the operation no longer uses its tensors."""
        return self.is_decided and (self._real is None or self._real.is_completed())

    def finish(self) -> None:
        """Wait until the data of a launched operation has moved.

        If a message arrives after its tensor is gone, gloo reads nothing more from the sending rank.
        """
        if not self.has_moved():
            with suppress(RuntimeError):  # the next operation reports a broken connection
                self._real.wait(_UNDER_WAY)

    # -- what torch and users call -----------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the operation is complete; raise its error if it failed."""
        if not self.is_decided:
            self._await_decision(timeout)
        if self._error is not None:
            note_error()
            note_set_order(self._error, self.operation)
            raise self._error
        if self._real is None or self._resolver == threading.get_ident():
            return True
        try:
            if self.was_left:
                self._coordinator.await_peers(self, PATIENCE_S)
            done = self._real.wait(timeout) if is_limit(timeout) else self._real.wait()
        except Exception as error:
            self._coordinator.is_torn = True
            self._resolve(self._noted(error))
            raise
        self._resolve()
        return bool(done)

    def is_completed(self) -> bool:
        """Return whether the operation is complete; if it is not, make it go on."""
        self._go_on()
        return self.has_moved()

    def is_success(self) -> bool:
        """Return whether the operation is complete without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        """Return the error of the operation; None if there is none."""
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result.

        Raises:
            RuntimeError: gloo has no future of this operation.
        """
        if self._is_of_gloo():
            refuse_future(self.operation)
        future = super().get_future()
        if graph_task_id() == -1:
            self._go_on()
        elif not self.has_moved():  # the backward pass waits at its end, or a DDP hook at once, in C++
            self._coordinator.reminders.add(self)
        return future

    def remind(self) -> None:
        """Make the operation go on; see :class:`pdlcheck.worlds.processes.rank.reminders.Remembered`."""
        if not self.has_moved():
            self._go_on(elsewhere=True)

    # -- inside ------------------------------------------------------------------------------------

    def _go_on(self, *, elsewhere: bool = False) -> None:
        """Make the operation go on, here and on the other ranks, even if no rank ever waits for it."""
        if not self.is_decided:
            self._coordinator.advance(self, elsewhere=elsewhere)
        if not self.is_decided:
            self._coordinator.request_grant(self)
        elif not self.has_moved():
            self._coordinator.tell_others(self)

    def _decide(self) -> None:
        self.is_decided = True
        self._decided.release()

    def _is_settled(self) -> bool:
        return self.is_decided

    def _await_decision(self, timeout: Any) -> None:
        coordinator = self._coordinator
        limit = timeout.total_seconds() if is_limit(timeout) else math.inf
        until = time.perf_counter() + limit
        if coordinator.look(self, min(PATIENCE_S, limit)) or (self.asked and self._decided_within(GRANT_S)):
            return
        coordinator.request_grant(self, waits=limit == math.inf)  # a wait with a limit ends by itself
        pause = GRANT_S
        while not self._decided_within(min(pause, max(until - time.perf_counter(), 0.0))):
            coordinator.advance(self)
            if not self.is_decided and time.perf_counter() > until:
                self._give_up(limit)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _give_up(self, limit: float) -> None:
        """Raise the error of a wait that has reached its limit; return if the message was launched meanwhile.

        As with gloo, the rank can wait again for a collective. After a message, nothing more of the group reaches this
        rank.
        """
        signature = self.operation.signature
        if signature.is_p2p and signature.peer >= 0 and self._is_of_gloo():
            if self._coordinator.abandon(self):
                self._coordinator.is_torn = True
                with suppress(RuntimeError):
                    self._real.wait(timedelta(milliseconds=1))
                self._error = RuntimeError("Application timeout caused pair closure")
                raise RuntimeError(f"Timed out waiting {1000 * limit:g}ms for {signature.op} operation to complete")
            return
        raise RuntimeError(f"Operation timed out! {limit:g} s have passed in {signature}")

    def _noted(self, error: Exception) -> Exception:
        """Return the error with a note that names the operation.

        The backend's message does not name it, and the rank may have posted it long ago.
        """
        error.add_note(f"{self._group.name()} said so of {self.operation.signature}")
        return error

    def _is_of_gloo(self) -> bool:
        return self._group is not None and self._group.name() == "gloo"

    def _decided_within(self, seconds: float) -> bool:
        if self._decided.acquire(timeout=seconds):
            self._decided.release()
        return self.is_decided

    def _settle_future(self) -> None:
        if self._error is not None:
            self._resolve(self._error)
            return
        self._real.get_future().add_done_callback(lambda _: self._resolve())

    def _resolve(self, error: Exception | None = None) -> None:
        future = self._future
        if future is None or future.done():
            return
        with self._resolving:
            if future.done():
                return
            self._resolver = threading.get_ident()
            try:
                if error is None:
                    with self._behind_the_result():
                        future.set_result(self.result())
                else:
                    future.set_exception(error if not isinstance(error, PeerFailed) else RuntimeError(str(error)))
            finally:
                self._resolver = 0

    def _behind_the_result(self) -> AbstractContextManager[None]:
        """Return a context in which callbacks compute with the result, also on a CUDA stream."""
        return self._group.behind(self._real) if isinstance(self._group, OnStream) else nullcontext()


def _way(s: Signature, source: int) -> tuple[object, ...]:
    """Return the key of a channel: a group, or a direction of messages between two ranks with one tag.

    The channel of a receive from any source is known only with the source. Until then, no later receive may go.
    """
    return (s.group, s.op, s.peer if s.peer >= 0 else source, s.tag) if s.is_p2p else (s.group,)


def own_error(error: Exception, operation: Operation) -> Exception:
    """Return a copy of ``error`` to raise once; a copy of ``PeerFailed`` names the operation that was stopped here."""
    return PeerFailed(f"in {operation.signature}") if isinstance(error, PeerFailed) else copy(error)


def note_set_order(error: Exception, operation: Operation) -> None:
    """Add a note to a mismatch that this rank is about to raise for an operation posted in a loop over a set.

    There is none if the user has given all processes one hash seed.
    """
    if not isinstance(error, CollectiveMismatch) or os.environ.get("PYTHONHASHSEED", "random") not in ("", "random"):
        return
    if loop := loop_of_post(operation.signature, sys._getframe(1)):
        note = (
            f"rank {operation.signature.rank} posts in the order of a set: {loop}; each process has its own order. "
            "Loop over sorted(...) or a list"
        )
        error.__notes__ = [
            *(one for one in getattr(error, "__notes__", ()) if one != note),
            note,
        ]  # copies share a list
