"""Gives a group's calls on CUDA tensors the stream of the rank that posted them.

A watched call is made later, by the control thread, whose current stream is another one: without the poster's stream
the group would not wait for what the poster has queued. Nor would what is put behind a future: gloo tells the host that
it is done before the device has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["OnStream"]


class OnStream:
    """A group whose methods run with ``stream`` as the current one."""

    def __init__(self, group: Any, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._stream = stream

    @contextmanager
    def behind(self, work: dist.Work) -> Iterator[None]:
        """In the block, what is queued comes after the result of ``work``, which the host has been told is done."""
        with torch.cuda.stream(self._stream):
            work.synchronize()
            yield

    def __getattr__(self, method: str) -> Callable[..., dist.Work]:
        call = getattr(self._group, method)

        def on_stream(*args: Any) -> Any:
            with torch.cuda.stream(self._stream):
                return call(*args)

        return on_stream
