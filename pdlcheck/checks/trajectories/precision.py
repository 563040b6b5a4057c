"""The precision of a training, and the tolerances that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pdlcheck.checks.state import made_by, made_wide

__all__ = ["PRECISIONS", "Precision", "made_for", "precision_of"]


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
    """Return the model that both trainings are given: in float64, or in float32 for any other dtype.

    Beside parameters that are trained in another dtype, frozen ones of a narrow dtype then stay as they are. The model
    casts between the two, perhaps to a fixed dtype.
    """
    if precision.dtype == torch.float64:
        return made_wide(make)
    model = made_by(make)
    tensors: list[Tensor] = [one for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()]
    trained = {one.dtype for one in tensors if one.requires_grad}
    kept = {one.dtype for one in tensors if one.dtype.itemsize < 4} - trained
    for one in tensors:
        if not (trained and one.dtype in kept):
            one.data = one.data.float()
    return model
