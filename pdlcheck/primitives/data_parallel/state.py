"""Parameters and buffers become those of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast_tensors"]


def broadcast_tensors(tensors: Iterable[Tensor], src: int, group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the values of the global rank ``src``, in one message for each device.

    Values travel as bytes, so dtypes may be mixed. Versions that autograd counts stay as they are: a batch norm
    may run twice before one backward pass, and does not need its running statistics there.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.data)
    for held in by_device.values():
        held.sort(key=lambda tensor: -tensor.dtype.itemsize)  # a stable order that keeps every piece aligned
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in held])
        dist.broadcast(flat, src, group=group)
        if dist.get_rank() == src:
            continue
        sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in held]
        for tensor, piece in zip(held, torch.split(flat, sizes), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
