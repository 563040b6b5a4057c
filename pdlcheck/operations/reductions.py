"""The reductions, as simulated ranks compute them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.operations.operation import Part

__all__ = ["Order", "multiplied", "reduce_name", "reduced"]

Order = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # sorts the values of a reduction into the order of adding
_names = {kind: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_name(reduce_op: Any) -> str:
    """Return the name of a reduce-op: ``SUM``, ``MAX``, ..."""
    return _names[reduce_op.__getstate__()[0]]


def reduced(values: Sequence[Tensor], reduce_op: Any, order: Order) -> Tensor:
    """Return the reduction of one tensor of each rank."""
    kind, _ = reduce_op.__getstate__()
    return _REDUCTIONS[kind.name](order(values))


def multiplied(parts: Sequence[Part], reduce_op: Any) -> list[Part]:
    """Return the parts of one rank with each input multiplied by the factor that this rank has passed."""
    _, factor = reduce_op.__getstate__()
    return [Part([tensor.detach() * factor for tensor in part.inputs], part.outputs) for part in parts]


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
