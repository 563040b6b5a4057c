"""The broadcast of parameters and buffers from one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.comm import star_broadcast
from pdlcheck.tensor_bytes import bytes_of

__all__ = ["broadcast_tensors"]


def broadcast_tensors(
    tensors: Iterable[Tensor], src: int, group: dist.ProcessGroup | None, by: str = "broadcast"
) -> None:
    """Copy the values of the global rank ``src`` to every rank of ``group``, in one message for each device.

    Values travel as bytes, so dtypes may be mixed. Autograd counts the change of a tensor, unless the tensor is another
    one's ``.data``.

    Args:
        tensors: the same shapes and dtypes on every rank, in the same order; overwritten on all ranks except ``src``.
        src: a global rank.
        group: process group; ``None`` is the default group.
        by: ``"broadcast"`` uses the backend's broadcast; with ``"messages"``, ``src`` sends to each other rank.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    for held in by_device.values():
        held.sort(key=lambda tensor: -tensor.dtype.itemsize)  # larger items first: every piece stays aligned
        flat = torch.cat([bytes_of(tensor) for tensor in held])
        if by == "messages":
            star_broadcast(flat, src, group)
        else:
            dist.broadcast(flat, src, group)
        if dist.get_rank() == src:
            continue
        sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in held]
        for tensor, piece in zip(held, torch.split(flat, sizes), strict=True):
            tensor.copy_(piece.view(tensor.dtype).view(tensor.shape))
