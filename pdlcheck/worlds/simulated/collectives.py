"""What each collective does to the tensors of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pdlcheck.worlds.watch import Operation, Part

__all__ = ["execute"]


def execute(operations: Sequence[Operation]) -> None:
    """Carry out one collective (operations in group order) or one message (send, recv).

    Outputs are written through ``.data``, so the version counters of tensors show only what the user wrote.
    Reductions add in group order, on every rank the same bits.
    """
    first = operations[0]
    signature = first.signature
    if signature.op == "barrier":
        return
    if signature.op == "send":
        sent, taken = operations[0].parts[0].inputs[0], operations[1].parts[0].outputs[0]
        _write(taken, sent.detach().reshape(taken.shape))
        return
    root = signature.members.index(signature.root) if signature.root >= 0 else 0
    with torch.no_grad():
        for index in range(len(first.parts)):
            parts = [operation.parts[index] for operation in operations]
            _MOVES[signature.op](parts, root, first.reduce_op)


def _all_reduce(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    total = _reduced([part.inputs[0] for part in parts], reduce_op)
    for part in parts:
        _write(part.outputs[0], total)


def _reduce(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    _write(parts[root].outputs[0], _reduced([part.inputs[0] for part in parts], reduce_op))


def _broadcast(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    value = parts[root].inputs[0].detach().clone()
    for rank, part in enumerate(parts):
        if rank != root:
            _write(part.outputs[0], value)


def _all_gather(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    values = [part.inputs[0].detach().clone() for part in parts]
    for part in parts:
        for output, value in zip(part.outputs, values, strict=True):
            _write(output, value)


def _gather(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    values = [part.inputs[0].detach().clone() for part in parts]
    for output, value in zip(parts[root].outputs, values, strict=True):
        _write(output, value)


def _scatter(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    values = [value.detach().clone() for value in parts[root].inputs]
    for part, value in zip(parts, values, strict=True):
        _write(part.outputs[0], value)


def _reduce_scatter(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    totals = [_reduced([part.inputs[i] for part in parts], reduce_op) for i in range(len(parts))]
    for part, total in zip(parts, totals, strict=True):
        _write(part.outputs[0], total)


def _all_to_all(parts: Sequence[Part], root: int, reduce_op: Any) -> None:
    values = [[value.detach().clone() for value in part.inputs] for part in parts]
    for rank, part in enumerate(parts):
        for output, row in zip(part.outputs, values, strict=True):
            _write(output, row[rank].reshape(output.shape))


_MOVES: dict[str, Callable[[Sequence[Part], int, Any], None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}


def _write(output: Tensor, value: Tensor) -> None:
    output.data.copy_(value.data)


def _average(values: Sequence[Tensor], factor: Any) -> Tensor:
    if not (values[0].is_floating_point() or values[0].is_complex()):
        raise ValueError(f"ReduceOp.AVG needs a floating-point tensor, got {values[0].dtype}; use SUM")
    return _sum(values, factor) / len(values)


def _sum(values: Sequence[Tensor], factor: Any) -> Tensor:
    total = values[0].detach().clone()
    for value in values[1:]:
        total += value.detach()
    return total


def _fold(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Sequence[Tensor], Any], Tensor]:
    return lambda values, factor: reduce(combine, [value.detach() for value in values]).clone()


_REDUCTIONS: dict[str, Callable[[Sequence[Tensor], Any], Tensor]] = {
    "AVG": _average,
    "BAND": _fold(torch.bitwise_and),
    "BOR": _fold(torch.bitwise_or),
    "BXOR": _fold(torch.bitwise_xor),
    "MAX": _fold(torch.maximum),
    "MIN": _fold(torch.minimum),
    "PREMUL_SUM": lambda values, factor: _sum([value.detach() * factor for value in values], None),
    "PRODUCT": _fold(torch.mul),
    "SUM": _sum,
}


def _reduced(values: Sequence[Tensor], reduce_op: Any) -> Tensor:
    kind, factor = reduce_op.__getstate__()
    return _REDUCTIONS[kind.name](values, factor)
