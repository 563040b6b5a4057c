"""Why a training ended elsewhere, as far as its weights tell: the precision, a factor, ranks that went apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pdlcheck.checks.message import show
from pdlcheck.checks.state import State, made_by, made_wide

__all__ = [
    "PRECISIONS",
    "Precision",
    "how_far",
    "how_ranks_differ",
    "likely_cause",
    "made_for",
    "precision_of",
    "wants_another_dtype",
]


class Precision(NamedTuple):
    """How near two trainings come that compute in a dtype.

    Args:
        dtype: the lowest in which one of them computes, adds up or sends.
        of_the_way: so much of the farthest way of a tensor's elements.
        of_the_weights: so much of its largest element.
    """

    dtype: torch.dtype
    of_the_way: float
    of_the_weights: float


# A step with a wrong gradient is off by 1e-3 of the way that the weights went and more, however short that way is
# beside the weights. float64 steps lose about 1e-16 of a weight each, float32 steps 6e-8, and training magnifies that;
# a gradient of n products in bfloat16, with 8 bits, is off by some hundredths of it.
PRECISIONS = {
    torch.float64: Precision(torch.float64, 1e-8, 1e-12),
    torch.float32: Precision(torch.float32, 1e-3, 1e-6),
    torch.float16: Precision(torch.float16, 2e-2, 1e-6),
    torch.bfloat16: Precision(torch.bfloat16, 1e-1, 1e-6),
}

_ADAM = (
    "; Adam divides gradients by their size, as clipping does: there, a wrong factor of all of them shows as little as "
    "this; SGD without clipping shows the factor"
)
_ROUNDING = 1e-5  # of the way: a wrong gradient is off by more


def precision_of(check: str, dtype: torch.dtype) -> Precision:
    """The precision of the argument ``dtype`` of a check."""
    if dtype not in PRECISIONS:
        raise ValueError(
            f"{check} takes as dtype the lowest precision in which a training computes or sends, one of "
            f"{', '.join(map(str, PRECISIONS))}; got {dtype!r}"
        )
    return PRECISIONS[dtype]


def made_for(precision: Precision, make: Callable[[], nn.Module]) -> nn.Module:
    """The model as both trainings are given it: in float64, and in float32 where one of them is no more precise."""
    return made_wide(make) if precision.dtype == torch.float64 else made_by(make).float()


def wants_another_dtype(error: RuntimeError) -> bool:
    """Whether data of one dtype met weights of another."""
    return re.search(r"\b(same dtype|[Dd]ouble|float64)\b", str(error)) is not None


def how_far(way: Tensor, went: Tensor) -> str | None:
    """The multiple of ``way`` that comes nearest to the way that the wrong tensors ``went``."""
    if not way.any():
        return None
    if not went.any():
        return "they did not move: no gradient reached the optimizer, or another model, such as a copy, was trained"
    times, cosine = _compared(way, went)
    told = f"they went {times:.6g} times as far in this direction, cosine {cosine:.6f}"
    return told + (_ADAM if (went - way).norm() <= 1e-2 * way.norm() else "")


def likely_cause(way: Tensor, went: Tensor, precision: Precision, world_size: int, apart: str | None) -> str | None:
    """What the way that the wrong tensors ``went`` tells; ``apart``: how ranks differ."""
    if not way.any() or not went.any():
        return None
    off = float((went - way).norm() / way.norm())
    if precision.dtype == torch.float64 and off <= _ROUNDING:
        return (
            f"without Adam and clipping, rounding in float32, as it is {off:.1e} of the way: something computes, adds "
            "up or sends in float32, such as a reduce_dtype; where that is meant, pass dtype=torch.float32"
        )
    if apart is not None:
        return "ranks went apart: a gradient was not synchronised, or a step not taken, on all of them alike"
    (times, cosine), as_many = _compared(way, went), f"as world_size is {world_size}"
    if world_size > 1 and cosine > 1 - 1e-6:
        if abs(times - world_size) < 1e-4 * world_size:
            return f"{as_many}: gradients are summed, not averaged, over ranks or as many micro-batches"
        if abs(times * world_size - 1) < 1e-4:
            return f"{as_many}: gradients are divided by it, or by as many micro-batches, once too often"
    return None


def how_ranks_differ(found: Sequence[State], name: str, precision: Precision) -> str | None:
    """Two ranks that do not hold the same of one tensor, where one does; None if all do."""
    first = found[0].get(name)
    for rank, state in enumerate(found[1:], start=1):
        own = state.get(name)
        if first is None or own is None or own.shape != first.shape:
            continue
        off = (own - first).abs()
        if off.numel() and float(off.max()) > precision.of_the_weights * float(first.abs().max()):
            at = tuple(torch.nonzero(off == off.max())[0].tolist())
            return f"rank 0 holds {show(first[at])} at {at} of {name}, rank {rank} holds {show(own[at])}"
    return None


def _compared(way: Tensor, went: Tensor) -> tuple[float, float]:
    """How many times ``way`` it is in that direction, and the cosine of the angle between the two."""
    along = went.dot(way)
    return float(along / way.dot(way)), float(along / (went.norm() * way.norm()))
