"""The CUDA stream of the posting rank, for a group's calls on CUDA tensors.

The control thread may make a watched call later, and its current stream is a different one. Without the poster's
stream, the group would not wait for the work that the poster has queued. The callbacks of a future have the same
problem: gloo reports to the host that an operation is done before the device has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["OnStream"]


class OnStream:
    """A group whose methods run with ``stream`` as the current CUDA stream."""

    def __init__(self, group: Any, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._stream = stream

    @contextmanager
    def behind(self, work: dist.Work) -> Iterator[None]:
        """Make the device work that the block queues wait for the result of ``work``.

        gloo has reported ``work`` as done to the host only.
        """
        with torch.cuda.stream(self._stream):
            work.synchronize()
            yield

    def __getattr__(self, method: str) -> Callable[..., dist.Work]:
        call = getattr(self._group, method)

        def on_stream(*args: Any) -> Any:
            with torch.cuda.stream(self._stream):
                return call(*args)

        return on_stream
