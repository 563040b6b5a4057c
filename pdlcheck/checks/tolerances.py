"""Tolerances for numbers that are added in another order, for each dtype in which checks compare.

Sums of a few thousand terms agree to 1e-13 of their terms in float64, and to 1e-5 in float32. The smallest fault that a
check must detect moves a number by more. A wrong weight of one sample in a thousand moves it by 1e-3. A missing share
moves any sum that is worth distributing by 1e-6.
"""

from __future__ import annotations

import torch

__all__ = ["ABSOLUTE", "NARROW", "RELATIVE", "ROUNDED", "require_dtype"]

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest number of a tensor
ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-7}  # of the largest of all gradients

NARROW = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest number: two rounding errors of the narrow dtype

ROUNDED = "it differs by no more than float32 rounds: if that is meant to compute in float32, pass dtype=torch.float32"


def require_dtype(check: str, dtype: torch.dtype) -> None:
    """Raise an error if checks cannot compare in ``dtype``.

    Raises:
        ValueError: names the argument and the supported dtypes.
    """
    if dtype not in RELATIVE:
        raise ValueError(f"{check} compares in torch.float64 or torch.float32, got dtype={dtype}")
