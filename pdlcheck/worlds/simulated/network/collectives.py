"""What each collective does to the tensors of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pdlcheck.worlds.watch import Operation, Part

__all__ = ["Order", "Write", "moves", "read_by", "write", "writes_as_user", "written_by"]

Write = tuple[Tensor, Tensor]  # (output, its new value)
Order = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the values of a reduction, in the order of adding


def moves(operations: Sequence[Operation], parts: Sequence[Sequence[Part]], order: Order) -> list[list[Write]]:
    """Work out one collective (operations in group order) or one message (send, recv).

    ``parts[i]`` are those of ``operations[i]``, their inputs maybe copies. Reductions add in one order for all ranks,
    so every rank gets the same bits.

    Returns:
        For each operation, what is to be written; a value of a collective is a copy, that of a message is the sent
        tensor itself.
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
    """The tensors that an operation reads on its rank."""
    signature = operation.signature
    if signature.op == "broadcast" and signature.root != signature.rank:
        return []
    return [tensor for part in operation.parts for tensor in part.inputs]


def written_by(operation: Operation) -> list[Tensor]:
    """The tensors that an operation writes on its rank."""
    signature = operation.signature
    if signature.op in ("broadcast", "reduce") and (signature.op == "reduce") != (signature.root == signature.rank):
        return []
    return [tensor for part in operation.parts for tensor in part.outputs]


_COPIED = frozenset({"all_gather", "gather", "reduce_scatter"})


def writes_as_user(operation: Operation) -> bool:
    """Whether torch copies results into the tensors as a user would: where autograd has saved one, its backward raises.

    It does where ranks have parts of a whole, and for several tensors at once; else it writes to the memory itself.
    """
    return operation.signature.op in _COPIED or operation.method in ("alltoall", "allreduce_coalesced")


def write(writes: Sequence[Write], *, as_user: bool) -> None:
    """Write through ``.data``, so the version counters of tensors show only what the user wrote, unless ``as_user``.

    A sparse tensor is given other indices and values, which ``.data`` would keep to itself; its version is counted.
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
    """The inputs of ranks that differ in dimensions of one element."""
    shapes = [tensor.shape for part in parts for tensor in part.inputs[:1]]
    return [Part([tensor.reshape(shapes[0]) for tensor in part.inputs], part.outputs) for part in parts]


def _multiplied(parts: Sequence[Part], operation: Operation) -> list[Part]:
    """Each rank's inputs times the factor that this rank has given."""
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
    """As C++ compares, and gloo: a NaN stays where it comes first, and is lost where it comes later."""
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
    "PREMUL_SUM": _sum,  # of inputs that are multiplied already
    "PRODUCT": _fold(torch.mul),
    "SUM": _sum,
}


def _reduced(values: Sequence[Tensor], reduce_op: Any, order: Order) -> Tensor:
    kind, _ = reduce_op.__getstate__()
    return _REDUCTIONS[kind.name](order(values))
