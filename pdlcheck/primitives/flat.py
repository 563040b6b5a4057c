"""Flat buffers: many tensors travel as one message, because a message costs more than its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors  # one call into C++ for all tensors

__all__ = ["flatten", "gradient_dtype", "sum_dtype", "unflatten", "wire_buckets"]

LOW_PRECISION = (torch.float16, torch.bfloat16)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed over ranks.

    float16 and bfloat16 in float32, where a small contribution is not lost beside a large one;
    integers and booleans in int64, where they do not wrap.
    """
    if dtype in LOW_PRECISION:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that the gradient of ``parameter`` has: its own, unless its attribute ``grad_dtype`` says otherwise."""
    chosen = getattr(parameter, "grad_dtype", None) if parameter.is_leaf else None
    return chosen or parameter.dtype


def wire_buckets(
    tensors: Sequence[Tensor],
    wire: Callable[[torch.dtype], torch.dtype],
    bucket_bytes: int | None = None,
) -> list[list[int]]:
    """Positions in ``tensors`` of those that share a flat buffer: same wire dtype, same device, in their
    order.

    Args:
        tensors: what is to travel.
        wire: the dtype in which a tensor of a given dtype travels.
        bucket_bytes: a bucket is closed when it holds this much; a larger tensor has a bucket of its own.
            ``None`` is one bucket for each dtype and device.
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
    """A new vector of all elements, each tensor in its logical order whatever its strides."""
    with torch.no_grad():
        alike = [tensor if tensor.dtype is dtype else tensor.to(dtype) for tensor in tensors]
        if len(alike) == 1:  # of which torch would return a view
            return alike[0].flatten().clone()
        return _flatten_dense_tensors(alike)  # type: ignore[no-untyped-call, no-any-return]  # torch leaves it untyped


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of ``flat`` with the shapes of ``like``."""
    return _unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call, no-any-return]  # torch leaves it untyped
