"""Gives a group's calls on CUDA tensors the stream of the rank that posted them.

A watched call is made later, by the control thread, whose current stream is another one: without the poster's stream
the group would not wait for what the poster has queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.worlds.processes.rank.announce import GroupEngine
from pdlcheck.worlds.watch import Operation

__all__ = ["CudaAwareEngine"]


class CudaAwareEngine(GroupEngine):
    """The engine of one watched gloo group in a torch that can have CUDA tensors."""

    def post(self, operation: Operation) -> dist.Work:
        """See :class:`pdlcheck.worlds.watch.Engine`.

        Raises:
            ValueError: a message of a CUDA tensor. gloo would hand its address to the network and end the process.
        """
        tensor = _first_tensor(operation)
        if tensor is None or not tensor.is_cuda:
            return super().post(operation)
        if operation.signature.op in ("send", "recv"):
            raise ValueError(
                f"gloo has no {operation.signature.op} for CUDA tensors, got one on {tensor.device}; "
                "move it to the CPU first (.cpu()), use a collective, or nccl"
            )
        stream = torch.cuda.current_stream(tensor.device)
        return self._announcer.post(operation, _OnStream(self._real, stream))


class _OnStream:
    """A group whose methods run with ``stream`` as the current one."""

    def __init__(self, group: Any, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._stream = stream

    def __getattr__(self, method: str) -> Callable[..., dist.Work]:
        call = getattr(self._group, method)

        def on_stream(*args: Any) -> Any:
            with torch.cuda.stream(self._stream):
                return call(*args)

        return on_stream


def _first_tensor(operation: Operation) -> Tensor | None:
    for part in operation.parts:
        for tensor in (*part.inputs, *part.outputs):
            return tensor
    return None
