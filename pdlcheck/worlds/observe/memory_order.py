"""The order of a tensor's elements in memory: backends add and move memory, and ignore strides.

If two tensors of one operation have different orders, as with a contiguous one and one in ``channels_last``, the wrong
elements are combined, and no other check detects it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.worlds.observe.operation import Operation, Part

__all__ = ["memory_order", "orders_between_ranks", "refuse_mixed_orders"]

_strided = torch.strided
_BETWEEN_RANKS = frozenset({"all_reduce", "broadcast", "reduce", "reduce_scatter", "scatter"})  # other ops make copies
_OF_LISTS = frozenset({"reduce_scatter", "scatter"})  # gloo copies the listed tensors into one and moves that
_ALL_TO_ALL = frozenset({"all_to_all_single", "alltoall_base"})


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest, without those of size 1; empty if they are in order."""
    if tensor.layout is not _strided or tensor.is_contiguous():
        return ()
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    order = tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
    return () if order == tuple(range(len(strides))) else order


def orders_between_ranks(op: str, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Return the memory orders that must agree between ranks; empty if all are in order or the order is irrelevant."""
    if op not in _BETWEEN_RANKS:
        return ()
    for tensor in tensors:
        if not (tensor.layout is _strided and tensor.is_contiguous()):
            orders = tuple(map(memory_order, tensors))
            return orders if any(orders) else ()
    return ()


def refuse_mixed_orders(part: Part, operation: Operation) -> None:
    """Check that the tensors between which an operation moves data on one rank have one memory order.

    Raises:
        RuntimeError: the orders differ.
    """
    op, method = operation.signature.op, operation.method
    if method in _OF_LISTS:
        tensors = [*part.inputs, *part.outputs]
    elif method in _ALL_TO_ALL:
        tensors = [operation.args[0]]
    else:
        return
    if all(tensor.layout is _strided and tensor.is_contiguous() for tensor in tensors):
        return
    orders = {memory_order(tensor): tensor for tensor in tensors}
    if orders.keys() != {()} and (len(orders) > 1 or method in _ALL_TO_ALL):
        found = " and ".join(f"shape {tuple(one.shape)}, strides {one.stride()}" for one in orders.values())
        raise RuntimeError(f"{op} moves memory as it lies, whatever the strides, and got {found}; call .contiguous()")
