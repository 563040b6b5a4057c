"""The precision of a training, and the tolerances that it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from pdlcheck.checks.state import made_by, made_wide

__all__ = ["PRECISIONS", "Precision", "made_for", "precision_of", "wants_another_dtype"]


class Precision(NamedTuple):
    """The tolerances for two trainings that compute in a dtype.

    Args:
        dtype: the lowest in which one of them computes, adds up or sends.
        of_the_way: relative to the farthest way of a tensor's elements.
        of_the_weights: relative to the tensor's largest element.
        of_the_farthest: relative to the farthest way of any weight.
    """

    dtype: torch.dtype
    of_the_way: float
    of_the_weights: float
    of_the_farthest: float


# A step with a wrong gradient is off by 1e-3 or more of the distance that the weights moved, however short that
# distance is compared with the weights. float64 steps lose about 1e-16 of a weight each, float32 steps 6e-8, and
# training magnifies that. A gradient of n products in bfloat16, which has 8 bits, is off by some hundredths. A gradient
# whose exact sum is zero, as that of the bias of the keys in attention, is as large as the rounding of its summands.
# Other gradients have that rounding error, too.
PRECISIONS = {
    torch.float64: Precision(torch.float64, 1e-8, 1e-12, 1e-12),
    torch.float32: Precision(torch.float32, 1e-3, 1e-6, 1e-6),
    torch.float16: Precision(torch.float16, 2e-2, 1e-6, 1e-4),
    torch.bfloat16: Precision(torch.bfloat16, 1e-1, 1e-6, 1e-3),
}


def precision_of(check: str, dtype: torch.dtype) -> Precision:
    """Return the precision for the argument ``dtype`` of a check.

    Raises:
        ValueError: names the supported dtypes.
    """
    if dtype not in PRECISIONS:
        raise ValueError(
            f"{check} takes as dtype the lowest precision in which a training computes or sends, one of "
            f"{', '.join(map(str, PRECISIONS))}; got {dtype!r}"
        )
    return PRECISIONS[dtype]


def made_for(precision: Precision, make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that both trainings are given: in float64, or in float32 for any other dtype."""
    return made_wide(make) if precision.dtype == torch.float64 else made_by(make).float()


def wants_another_dtype(error: RuntimeError) -> bool:
    """Return whether the error is that of data of one dtype with weights of another."""
    return re.search(r"\b(same dtype|[Dd]ouble|float64)\b", str(error)) is not None
