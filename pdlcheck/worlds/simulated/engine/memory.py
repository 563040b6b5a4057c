"""The memory of tensors, and whether two tensors share some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.compat.torch.tensors import sparse_parts, storage_key

__all__ = ["memories", "overlap", "storage_of"]


def memories(tensor: Tensor) -> Sequence[Tensor]:
    """Return the strided tensors that hold the elements: the tensor itself, or the indices and values of a sparse one.

    A sparse tensor in another layout than COO has none.
    """
    if tensor.layout == torch.strided:
        return (tensor,)
    return sparse_parts(tensor) if tensor.layout == torch.sparse_coo else ()


def storage_of(memory: Tensor) -> int:
    """Return a number that is equal for two tensors of one storage."""
    return int(storage_key(memory.untyped_storage()))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage share a byte."""
    first, second = _span(one), _span(other)
    if first[0] >= second[1] or second[0] >= first[1]:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    return bool(_bytes(one) & _bytes(other))


def _span(tensor: Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    steps = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (first, first + (steps + 1) * size) if tensor.numel() else (first, first)


def _bytes(tensor: Tensor) -> set[int]:
    size, places = tensor.element_size(), {int(tensor.storage_offset())}
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + step * stride for place in places for step in range(extent)}
    return {place * size + byte for place in places for byte in range(size)}
