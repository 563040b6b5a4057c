"""The order of a tensor's elements in memory: backends add and move memory, and ignore strides.

If two tensors of one operation have different orders, as with a contiguous one and one in ``channels_last``, the wrong
elements are combined, and no other check detects it. If other elements lie between those of a tensor, as between those
of a column, gloo takes these in their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.operations.operation import Operation

__all__ = ["memory_order", "memory_orders", "refuse_gaps", "refuse_mixed_lists", "refuse_mixed_orders"]

_strided = torch.strided


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest, without those of size 1; empty if they are in order."""
    if tensor.layout is not _strided or tensor.is_contiguous():
        return ()
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    order = tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    return () if order == tuple(range(len(strides))) else order


def memory_orders(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the memory orders that must agree between ranks; empty if all are in order."""
    for tensor in tensors:
        if not (tensor.layout is _strided and tensor.is_contiguous()):
            orders = tuple(map(memory_order, tensors))
            return orders if any(orders) else ()
    return ()


def refuse_mixed_orders(op: str, tensors: Sequence[Tensor], *, or_permuted: bool = False) -> None:
    """Check that the tensors between which an operation moves data on one rank have one memory order.

    Args:
        op: the name of the operation.
        tensors: the tensors.
        or_permuted: refuse tensors of one order, too, if they are not contiguous.

    Raises:
        RuntimeError: the orders differ.
    """
    if all(tensor.layout is _strided and tensor.is_contiguous() for tensor in tensors):
        return
    orders = {memory_order(tensor): tensor for tensor in tensors}
    if orders.keys() != {()} and (len(orders) > 1 or or_permuted):
        found = " and ".join(f"shape {tuple(one.shape)}, strides {one.stride()}" for one in orders.values())
        raise RuntimeError(f"{op} moves memory as it lies, whatever the strides, and got {found}; call .contiguous()")


def refuse_gaps(op: str, tensors: Sequence[Tensor]) -> None:
    """Check that the elements of tensors that gloo moves as they lie are one block of memory.

    Raises:
        RuntimeError: other elements lie between them. gloo would move wrong elements, NCCL refuses them.
    """
    for tensor in tensors:
        if tensor.layout is _strided and not tensor.is_contiguous() and tensor.numel():
            shape, strides = tuple(tensor.shape), tensor.stride()
            if sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 > tensor.numel():
                raise RuntimeError(
                    f"{op} moves memory as it lies, whatever the strides, and got a tensor with other elements between "
                    f"its own, as a column has: shape {shape}, strides {strides}; call .contiguous(), and copy the "
                    "result"
                )


def refuse_mixed_lists(operation: Operation) -> None:
    """Check the memory order of a call that takes a list: gloo copies the listed tensors into one and moves that.

    Raises:
        RuntimeError: the orders differ, or an output is no block of memory.
    """
    for part in operation.parts:
        refuse_mixed_orders(operation.signature.op, [*part.inputs, *part.outputs])
        refuse_gaps(operation.signature.op, part.outputs)
