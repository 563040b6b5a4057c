"""The effect of each collective on the tensors of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pdlcheck.worlds.observe import Operation, Part

__all__ = ["Order", "Write", "moves", "read_by", "write", "writes_as_user", "written_by"]

Write = tuple[Tensor, Tensor]  # (output, its new value)
Order = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # sorts the values of a reduction into the order of adding


def moves(operations: Sequence[Operation], parts: Sequence[Sequence[Part]], order: Order) -> list[list[Write]]:
    """Compute one collective (operations in group order) or one message (send, recv).

    Reductions add in one order for all ranks, so every rank gets the same bits.

    Args:
        operations: the operations of all ranks.
        parts: ``parts[i]`` are the parts of ``operations[i]``. Their inputs may be copies.
        order: sorts the values of a reduction into the order of adding.

    Returns:
        The writes of each operation. The value of a collective is a copy; that of a message is the sent tensor itself.
    """
    signature = operations[0].signature
    if not operations[0].parts:  # a barrier
        return [[] for _ in operations]
    if signature.op == "send":
        sent, taken = parts[0][0].inputs[0], parts[1][0].outputs[0]
        return [[], [(taken, sent.detach().reshape(taken.shape))]]
    root = signature.members.index(signature.root) if signature.root >= 0 else 0
    if signature.reduce_op == "PREMUL_SUM":
        parts = [_multiplied(own, operation) for own, operation in zip(parts, operations, strict=True)]
    writes: list[list[Write]] = [[] for _ in operations]
    alike = all(operation.signature.shapes == signature.shapes for operation in operations)
    for column in zip(*parts, strict=True):
        ranks = column if alike else _in_one_shape(column)
        moved = _MOVES[signature.op](ranks, root, operations[0].reduce_op, order)
        for mine, more in zip(writes, moved, strict=True):
            mine += more
    return writes


def read_by(operation: Operation) -> list[Tensor]:
    """Return the tensors that an operation reads on its rank."""
    signature = operation.signature
    if signature.op == "broadcast" and signature.root != signature.rank:
        return []
    return [tensor for part in operation.parts for tensor in part.inputs]


def written_by(operation: Operation) -> list[Tensor]:
    """Return the tensors that an operation writes on its rank."""
    signature = operation.signature
    if signature.op in ("broadcast", "reduce") and (signature.op == "reduce") != (signature.root == signature.rank):
        return []
    return [tensor for part in operation.parts for tensor in part.outputs]


_COPIED = frozenset({"all_gather", "gather", "reduce_scatter"})


def writes_as_user(operation: Operation) -> bool:
    """Return whether torch copies results into the tensors as a user would, so that autograd detects the change.

    If autograd has saved such a tensor, its backward pass raises. torch copies where ranks have parts of a whole, and
    where an operation has several tensors. In other operations it writes to the memory itself.
    """
    return operation.signature.op in _COPIED or operation.method in ("alltoall", "allreduce_coalesced")


def write(writes: Sequence[Write], *, as_user: bool) -> None:
    """Write the values through ``.data``, so that version counters of tensors show only the user's writes.

    With ``as_user``, the version counters change too. A sparse tensor gets new indices and values, which ``.data``
    would keep to itself; its version always changes.
    """
    for output, value in writes:
        if as_user and not output.is_inference():
            torch.autograd.graph.increment_version(output)
        if output.layout == torch.strided:
            output.data.copy_(value.data if value.shape == output.shape else value.data.reshape(output.shape))
        else:
            with torch.no_grad():
                output.copy_(value.data)


def _in_one_shape(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts with all inputs in the shape of the first: they may differ in dimensions of one element."""
    shapes = [tensor.shape for part in parts for tensor in part.inputs[:1]]
    return [Part([tensor.reshape(shapes[0]) for tensor in part.inputs], part.outputs) for part in parts]


def _multiplied(parts: Sequence[Part], operation: Operation) -> list[Part]:
    """Return the parts of one rank with each input multiplied by the factor that this rank has passed."""
    _, factor = operation.reduce_op.__getstate__()
    return [Part([tensor.detach() * factor for tensor in part.inputs], part.outputs) for part in parts]


Parts = Sequence[Part]  # one of each rank, in group order


def _all_reduce(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    total = _reduced([part.inputs[0] for part in parts], reduce_op, order)
    return [[(part.outputs[0], total)] for part in parts]


def _reduce(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    total = _reduced([part.inputs[0] for part in parts], reduce_op, order)
    return [[(part.outputs[0], total)] if rank == root else [] for rank, part in enumerate(parts)]


def _broadcast(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    value = parts[root].inputs[0].detach().clone()
    return [[(part.outputs[0], value)] if rank != root else [] for rank, part in enumerate(parts)]


def _all_gather(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    values = [part.inputs[0].detach().clone() for part in parts]
    return [list(zip(part.outputs, values, strict=True)) for part in parts]


def _gather(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    values = [part.inputs[0].detach().clone() for part in parts]
    return [list(zip(p.outputs, values, strict=True)) if rank == root else [] for rank, p in enumerate(parts)]


def _scatter(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    values = [value.detach().clone() for value in parts[root].inputs]
    return [[(part.outputs[0], value)] for part, value in zip(parts, values, strict=True)]


def _reduce_scatter(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    totals = [_reduced([part.inputs[i] for part in parts], reduce_op, order) for i in range(len(parts))]
    return [[(part.outputs[0], total)] for part, total in zip(parts, totals, strict=True)]


def _all_to_all(parts: Parts, root: int, reduce_op: Any, order: Order) -> list[list[Write]]:
    values = [[value.detach().clone() for value in part.inputs] for part in parts]
    return [
        [(output, row[rank].reshape(output.shape)) for output, row in zip(part.outputs, values, strict=True)]
        for rank, part in enumerate(parts)
    ]


_MOVES: dict[str, Callable[[Parts, int, Any, Order], list[list[Write]]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}


def _average(values: Sequence[Tensor]) -> Tensor:
    return _sum(values) / len(values)


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].detach().clone()
    for value in values[1:]:
        total += value.detach()
    return total.coalesce() if total.is_sparse else total


def _larger(one: Tensor, other: Tensor) -> Tensor:
    """Return the larger elements as C++ and gloo compare.

    A NaN stays if it comes first, and is lost if it comes later.
    """
    return torch.where(one < other, other, one)


def _smaller(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(other < one, other, one)


def _fold(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda values: reduce(combine, [value.detach() for value in values]).clone()


_REDUCTIONS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "AVG": _average,
    "BAND": _fold(torch.bitwise_and),
    "BOR": _fold(torch.bitwise_or),
    "BXOR": _fold(torch.bitwise_xor),
    "MAX": _fold(_larger),
    "MIN": _fold(_smaller),
    "PREMUL_SUM": _sum,  # the inputs are multiplied already
    "PRODUCT": _fold(torch.mul),
    "SUM": _sum,
}


def _reduced(values: Sequence[Tensor], reduce_op: Any, order: Order) -> Tensor:
    kind, _ = reduce_op.__getstate__()
    return _REDUCTIONS[kind.name](order(values))
