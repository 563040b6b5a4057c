"""The common part of the handles of watched operations, in every world."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.compat.torch.autograd import call_after_backward, current_node, in_backward
from pdlcheck.operations.operation import Operation
from pdlcheck.uncompiled import uncompiled

__all__ = ["FROM_CALLBACK", "WatchedFuture", "WatchedWork", "is_limit"]

FROM_CALLBACK = "Got the following error when running the callback"  # the prefix that torch's futures use


def is_limit(timeout: Any) -> bool:
    """Return whether a wait ends after ``timeout``; torch passes zero for no limit."""
    return isinstance(timeout, timedelta) and timeout > timedelta(0)


@uncompiled
class WatchedWork(dist.Work):
    """The handle of an operation; a subclass defines how to wait, and when the outcome is final."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation
        self._source = -1  # the sender's number in the group
        self._future: WatchedFuture | None = None

    def synchronize(self) -> None:
        """Wait for the operation."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of the operation."""
        return self.operation.method.kind.results(self.operation)

    def source_rank(self) -> int:
        """Return the number in the group of the rank that sent the message."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the operation's result."""
        future = self._future
        if future is None:
            future = self._future = WatchedFuture(self)
            if self._is_settled():
                self._settle_future()
            elif in_backward():
                # DDP's reducer will block on this future in C++, where no world detects it: wait here first
                if current_node() is None:  # in a callback, after the backward pass
                    self.synchronize()
                else:
                    call_after_backward(self.synchronize)
        return future

    def _is_settled(self) -> bool:
        """Return True once it is certain that the operation completes, or that it never will."""
        raise TypeError(f"{type(self).__name__} must say when an operation is settled")

    def _settle_future(self) -> None:
        """Make sure that the future of a settled operation is resolved."""
        raise TypeError(f"{type(self).__name__} must resolve the future of an operation")


@uncompiled
class WatchedFuture(torch.futures.Future[Any]):
    """A future whose ``wait`` waits for the operation."""

    def __init__(self, work: WatchedWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        """Wait for the operation and return the value."""
        self._work.wait()
        return super().wait()

    def done(self) -> bool:
        """Return whether the future is done; a poll lets the operation go on, as ``is_completed`` of the work does."""
        if not super().done():
            self._work.is_completed()
        return super().done()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        """Return a future of the callback's result."""
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
    """A future of a callback's result.

    Its ``wait`` first waits for the operation. The callback may have handled the error of the operation already.
    """

    def wait(self) -> Any:
        try:
            self._work.wait()
        except Exception:
            if not self.done():
                raise
        return torch.futures.Future.wait(self)
