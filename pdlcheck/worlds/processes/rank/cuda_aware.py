"""The engine of a watched gloo group in a torch that can have CUDA tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.worlds.observe import Operation
from pdlcheck.worlds.processes.rank.coordinator import GroupEngine
from pdlcheck.worlds.processes.rank.on_stream import OnStream

__all__ = ["CudaAwareEngine"]


class CudaAwareEngine(GroupEngine):
    """An engine that passes on calls on CUDA tensors with the stream of the rank that posted them."""

    def post(self, operation: Operation) -> dist.Work:
        """Post an operation; see :class:`pdlcheck.worlds.observe.Engine`.

        Raises:
            ValueError: the operation sends or receives a CUDA tensor. gloo would pass its address to the network and
                end the process.
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
        return self._coordinator.post(operation, OnStream(self._real, stream))


def _first_tensor(operation: Operation) -> Tensor | None:
    for part in operation.parts:
        for tensor in (*part.inputs, *part.outputs):
            return tensor
    return None
