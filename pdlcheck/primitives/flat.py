"""Flat buffers: many tensors travel as one message, because each message has a fixed cost beside its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pdlcheck.compat.torch.flat import flatten_dense_tensors, unflatten_dense_tensors

__all__ = ["flatten", "gradient_dtype", "sum_dtype", "unflatten", "wire_buckets"]

LOW_PRECISION = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed over ranks.

    float16 and bfloat16 are summed in float32, so that a small contribution is not lost beside a large one. Integers
    and booleans are summed in int64, so that they do not wrap.
    """
    if dtype in LOW_PRECISION:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of the gradient of ``parameter``: its own dtype, unless its attribute ``grad_dtype`` is set."""
    chosen = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return chosen or parameter.dtype


def wire_buckets(
    tensors: Sequence[Tensor],
    wire: Callable[[torch.dtype], torch.dtype],
    bucket_bytes: int | None = None,
) -> list[list[int]]:
    """Return, for each flat buffer, the positions in ``tensors`` that share it: same wire dtype and device, in order.

    Args:
        tensors: the tensors to send.
        wire: returns the dtype in which a tensor of a given dtype travels.
        bucket_bytes: a bucket is closed before it exceeds this size; a larger tensor has a bucket of its own. ``None``
            makes one bucket for each dtype and device.
    """
    closed: list[list[int]] = []
    current: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for position, tensor in enumerate(tensors):
        kind = wire(tensor.dtype), tensor.device
        nbytes = tensor.numel() * kind[0].itemsize
        if bucket_bytes is not None and kind in current and filled[kind] + nbytes > bucket_bytes:
            closed.append(current.pop(kind))
        filled[kind] = nbytes + (filled[kind] if kind in current else 0)
        current.setdefault(kind, []).append(position)
    return closed + list(current.values())


def flatten(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a new vector of all elements, each tensor in its logical order, independent of its strides."""
    with torch.no_grad():
        alike = [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors]
        if len(alike) == 1:  # torch would return a view of a single tensor
            return alike[0].flatten().clone()
        return flatten_dense_tensors(alike)


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return views of ``flat`` with the shapes of ``like``."""
    return unflatten_dense_tensors(flat, like)
