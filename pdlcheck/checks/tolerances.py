"""Tolerances for numbers that are added in another order, for each dtype in which checks compare.

Sums of a few thousand terms agree to 1e-13 of their terms in float64, and to 1e-5 in float32. The smallest fault that a
check must detect moves a number by more. A wrong weight of one sample in a thousand moves it by 1e-3. A missing share
moves any sum that is worth distributing by 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ABSOLUTE", "EXACT", "NARROW", "RELATIVE", "ROUNDED", "Tolerance", "distance", "require_dtype"]

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest number of a tensor
ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-7}  # of the largest of all gradients

NARROW = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest number: two rounding errors of the narrow dtype

ROUNDED = "it differs by no more than float32 rounds: if that is meant to compute in float32, pass dtype=torch.float32"


@dataclass(frozen=True)
class Tolerance:
    """The largest distance of two elements that count as equal: ``relative * largest + absolute``.

    Args:
        relative: relative to the largest finite element of the tensor that is compared with.
        absolute: one number, or one for each element.
    """

    relative: float = 0.0
    absolute: float | Tensor = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance for numbers that are computed in ``dtype``; integers are exact."""
        relative = (RELATIVE | NARROW).get(dtype.to_real() if dtype.is_complex else dtype, 0.0)
        return cls(relative=relative)

    def accepts(self, found: Tensor, goal: Tensor) -> Tensor:
        """Return a mask of the elements of ``found`` that equal those of ``goal``, a tensor of the same shape."""
        finite = goal[goal.isfinite()].abs()
        largest = float(finite.max()) if self.relative and finite.numel() else 0.0
        return distance(found, goal) <= self.relative * largest + self.absolute


EXACT = Tolerance()


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return the distance of each pair of elements, in float64: 0 for equal ones, NaN included; inf for other NaN."""
    exact = not any(each.is_floating_point() or each.is_complex() for each in (one, other))
    wide = torch.int64 if exact else torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.detach().to(wide), other.detach().to(wide)
    apart = (one - other).abs().double()
    same = (one == other) | (one.isnan() & other.isnan())
    return apart.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)


def require_dtype(check: str, dtype: torch.dtype) -> None:
    """Raise an error if checks cannot compare in ``dtype``.

    Raises:
        ValueError: names the argument and the supported dtypes.
    """
    if dtype not in RELATIVE:
        raise ValueError(f"{check} compares in torch.float64 or torch.float32, got dtype={dtype}")
