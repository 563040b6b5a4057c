"""What the handles of watched operations have in common, whoever carries the operations out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.watch.operation import Operation

__all__ = ["FROM_CALLBACK", "WatchedFuture", "WatchedWork", "is_limit"]

FROM_CALLBACK = "Got the following error when running the callback"  # as torch's futures begin what they wrap


def is_limit(timeout: Any) -> bool:
    """Does a wait end after ``timeout``? torch passes zero for none."""
    return isinstance(timeout, timedelta) and timeout > timedelta(0)


@uncompiled
class WatchedWork(dist.Work):
    """The handle of an operation; a subclass says how to wait, and when the outcome is known."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        self._source = -1  # place in the group of the rank that a message came from
        self._future: WatchedFuture | None = None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        operation = self.operation
        if operation.signature.op == "all_to_all" and isinstance(operation.args[0], torch.Tensor):
            return [operation.args[0]]  # whole, whose pieces are the outputs
        return [tensor for part in operation.parts for tensor in part.outputs]

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        future = self._future
        if future is None:
            future = self._future = WatchedFuture(self)
            if self._is_settled():
                self._settle_future()
            elif torch._C._current_graph_task_id() != -1:
                # DDP's reducer will block on this future in C++, where nobody sees it: wait here first
                if torch._C._current_autograd_node() is None:  # the pass is over: its callbacks run, this is one
                    self.synchronize()
                else:
                    torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        return future

    def _is_settled(self) -> bool:
        """True once it is known that the operation goes, or that it never will."""
        raise TypeError(f"{type(self).__name__} must say when an operation is settled")

    def _settle_future(self) -> None:
        """See to it that the future of a settled operation is resolved."""
        raise TypeError(f"{type(self).__name__} must resolve the future of an operation")


@uncompiled
class WatchedFuture(torch.futures.Future[Any]):
    """A future whose ``wait`` is the operation's own."""

    def __init__(self, work: WatchedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def done(self) -> bool:
        """Whoever polls lets the operation go on, as with ``is_completed`` of the work."""
        if not super().done():
            self._work.is_completed()
        return super().done()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        following = _FollowingFuture(self._work)

        def follow(future: torch.futures.Future[Any]) -> None:
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(RuntimeError(f"{FROM_CALLBACK}: {type(error).__name__}: {error}"))

        self.add_done_callback(follow)
        return following


@uncompiled
class _FollowingFuture(WatchedFuture):
    """What a callback returns: its ``wait`` is the operation's own first, whose error the callback may have taken."""

    def wait(self) -> Any:
        try:
            self._work.wait()
        except Exception:
            if not self.done():
                raise
        return torch.futures.Future.wait(self)
