"""The handle of an operation on simulated ranks, from the post to the moment when its results can be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from pdlcheck.compat.torch.modes import DisableTorchDispatch
from pdlcheck.operations.kind import Write
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.observe import Operation, Part, WatchedWork, is_limit, refuse_future, user_call, user_line
from pdlcheck.worlds.semantics import Semantics
from pdlcheck.worlds.simulated.engine.delivery import write
from pdlcheck.worlds.simulated.engine.gloo_errors import operation_timeout
from pdlcheck.worlds.simulated.engine.memory import memories, storage_of
from pdlcheck.worlds.simulated.engine.observer import Subscriptions
from pdlcheck.worlds.simulated.engine.origin import Origin
from pdlcheck.worlds.simulated.schedules.access import Post
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, Scheduler, current_rank

__all__ = ["SimulatedWork", "WorkCalls"]


class WorkCalls(Protocol):
    """What an operation calls back, in the engine that posted it."""

    semantics: Semantics
    events: Subscriptions
    scheduler: Scheduler

    def wait(self, ready: Callable[[], bool], waits_for: Any) -> None:
        """Block the running rank until ``ready()`` returns True."""

    def wait_for(self, work: SimulatedWork, limit_s: float) -> None:
        """Block the running rank until it may go on with ``work``, or until its time limit elapses."""

    def poll(self, work: SimulatedWork) -> None:
        """Give up the turn, because the running rank asks whether an operation is complete."""

    def close(self, work: SimulatedWork) -> None:
        """Close the connections of a rank that has given up waiting for a message."""

    def finish_earlier(self, waited: SimulatedWork) -> None:
        """Finish earlier collectives of the running rank, because it has waited for a later one."""

    def finished(self, work: SimulatedWork) -> None:
        """Record that the rank has the results of the operation."""


@uncompiled
class SimulatedWork(WatchedWork):
    """An operation that is posted, then *matched* when its partners are there, then *finished* by its rank.

    A rank that waits finishes a matched operation: results are delivered, and the buffers belong to the rank again.
    Polls and futures do so once the operation is *visible*, which the semantics may delay.
    """

    # class attributes, because most operations never change them
    holds_back = False  # results stay out of the outputs until this rank has waited
    matched = False
    visible = False
    finished = False
    move: Callable[[], None] | None = None  # reads and writes the data of the match
    results: Sequence[Write] = ()
    deliver: Callable[[Sequence[Write]], Sequence[Write]] | None = None  # changes the results, if an observer sets it
    _waited = False
    _gave_future = False
    _elapsed = False
    _lost: RuntimeError | None = None  # set if a rank is gone that the operation needs

    def __init__(self, calls: WorkCalls, operation: Operation, origin: Origin, post: Post) -> None:
        super().__init__(operation)
        self._post = post
        self._call = user_call() if calls.scheduler.every_post else None
        self.origin = origin
        self.parts = operation.parts
        self.owner: RankThread | None = current_rank()
        self._calls = calls

    def hold_back(self, outputs: Sequence[Tensor]) -> None:
        """Keep the results out of ``outputs`` until this rank has waited, because they will hold something else.

        Inputs that share memory with them are copied.
        """
        self.holds_back = True
        if self.operation.method.kind.reads(self.operation):
            with DisableTorchDispatch():  # hides this from the modes of the rank
                storages = {storage_of(memory) for tensor in outputs for memory in memories(tensor)}
                self.parts = [Part([_apart(x, storages) for x in p.inputs], p.outputs) for p in self.parts]

    def buffer(self) -> None:
        """Copy the data of a send now, because the send need not wait."""
        with DisableTorchDispatch():
            self.parts = [Part([x.detach().clone() for x in part.inputs], part.outputs) for part in self.parts]
        self.matched = self.visible = True

    def match(self, move: Callable[[], None]) -> None:
        """Record that all partners are there. The rank that came last calls this.

        Args:
            move: reads and writes the data of the match, at its first call.
        """
        self.move, self.matched = move, True

    def came_from(self, source: int) -> None:
        """Record the source of the message, as a place in the group."""
        self._source = source

    def show(self) -> None:
        """Make the operation visible to polls and futures."""
        self.visible = True
        if self._future is not None and self.owner is not None and not self.finished:
            # callbacks of the future must run in the thread of the rank that owns it
            self.owner.on_resume.append(self.finish)

    def finish(self) -> None:
        """Deliver the results. The owning rank calls this."""
        if not self.finished:
            self.finished = self.visible = True
            if self.move is not None:
                self.move()
            if self.results:
                with DisableTorchDispatch():
                    write(self.results, as_user=self.operation.method.copies)
                self.results = ()
            self._calls.finished(self)
        if self._future is not None:
            self._settle_future()

    def lose(self, error: RuntimeError) -> None:
        """Record that the operation will never be complete, because of ``error``."""
        self._lost = error
        if self._future is not None and self.owner is not None:
            self.owner.on_resume.append(self._settle_future)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the operation is complete, and deliver its results.

        Raises:
            RuntimeError: ``timeout`` has elapsed, or a rank is gone that the operation needs.
        """
        __tracebackhide__ = True
        again = self._waited and self._lost is None and not self._gave_future  # its future also waits by this method
        if again and self._may("second_wait") == "blocks":
            self._calls.wait(lambda: False, f"a second wait, at {user_line()}, for {self.operation.signature}")
        for observe in self._calls.events.waits:
            observe(self)
        if self._call is not None:
            self._post.blocks_in_call = self._call == user_call()
            self._call = None
        if is_limit(timeout):
            self._wait_within(timeout)
        else:
            self._calls.wait(self.may_go_on, self.operation.signature)
        self._waited = True
        if self._lost is not None:
            raise RuntimeError(str(self._lost))  # a new error, so that each wait has its own traceback
        for observe in self._calls.events.waited:
            observe(self)
        self.finish()
        if self._calls.semantics.waits == "earlier":
            self._calls.finish_earlier(self)
        return True

    def may_go_on(self) -> bool:
        """Return whether a rank that waits need not wait any longer."""
        return self.matched or self._lost is not None or self._elapsed

    @property
    def is_lost(self) -> bool:
        """Return whether the operation will never be complete."""
        return self._lost is not None

    def elapse(self) -> None:
        """Record that the limit of the present wait has elapsed."""
        self._elapsed = True

    def _wait_within(self, limit: timedelta) -> None:
        """Wait with a time limit, as gloo does.

        After the limit, a collective can be waited for again. After the limit of a message, no operation of the group
        reaches this rank any more.

        Raises:
            RuntimeError: the limit has elapsed.
        """
        __tracebackhide__ = True
        signature = self.operation.signature
        self._calls.wait_for(self, limit.total_seconds())
        elapsed, self._elapsed = self._elapsed, False
        if elapsed and not self.matched and self._lost is None:
            if not signature.is_p2p:
                raise RuntimeError(f"Operation timed out! {limit.total_seconds():g} s have passed in {signature}")
            self._calls.close(self)
            raise operation_timeout(signature, round(1000 * limit.total_seconds()))

    def _may(self, what: str) -> str:
        """Return the semantics of messages in this respect; empty for a collective.

        Polls of a ``reduce_scatter`` count as those of a message, because gloo treats that collective differently.
        """
        signature = self.operation.signature
        concerned = signature.is_p2p or (what == "polls" and not self.operation.method.kind.has_future)
        return str(getattr(self._calls.semantics, what)) if concerned else ""

    def is_completed(self) -> bool:
        """Return whether the operation is complete, and finish it if it is visible."""
        self._calls.poll(self)
        if self._may("polls") == "after_wait" and not self._waited:
            return False
        for observe in self._calls.events.polled:
            observe(self)
        if self.visible:
            self.finish()
        return self.finished or self._lost is not None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the operation."""
        if self._calls.semantics.messages != "in_order":
            refuse_future(self.operation)
        if not self._gave_future:
            for observe in self._calls.events.future_taken:
                observe(self)
        self._gave_future = True
        return super().get_future()

    def is_success(self) -> bool:
        """Return whether the operation is complete, without giving up the turn."""
        return self.visible and (self._waited or self._may("polls") != "after_wait")

    def exception(self) -> None:
        """Return None, because :meth:`wait` raises the error."""
        return None  # noqa: RET501 - torch's method returns an exception or None

    def _is_settled(self) -> bool:
        if self.visible:
            self.finish()
        return self.finished or self._lost is not None

    def _settle_future(self) -> None:
        future, self._future = self._future, None  # it refers to this work: breaks a reference cycle
        if future is None:
            return
        if self._lost is not None:
            future.set_exception(RuntimeError(str(self._lost)))
        else:
            future.set_result(self.result())


def _apart(tensor: Any, storages: set[int]) -> Any:
    """Return a copy of an input that shares memory with an output, because the poison would overwrite it.

    Return any other input itself.
    """
    return tensor.data.clone() if any(storage_of(memory) in storages for memory in memories(tensor)) else tensor
