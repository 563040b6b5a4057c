"""How far numbers may be off that were added in another order, in the dtypes in which checks compare.

Sums of a few thousand terms agree to 1e-13 of their terms in float64, to 1e-5 in float32. The smallest fault that is
looked for moves a number by more: a sample in a thousand with a wrong weight by 1e-3, a share that is missing by 1e-6
of any sum that is worth dividing.
"""

from __future__ import annotations

import torch

__all__ = ["ABSOLUTE", "NARROW", "RELATIVE", "ROUNDED", "require_dtype"]

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-5}  # of the largest number of a tensor
ABSOLUTE = {torch.float64: 1e-12, torch.float32: 1e-7}  # of the largest of all gradients

NARROW = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # what the narrow dtypes round of the largest number, twice

ROUNDED = "it differs by no more than float32 rounds: if that is meant to compute in float32, pass dtype=torch.float32"


def require_dtype(check: str, dtype: torch.dtype) -> None:
    """Refuse a dtype in which no check compares.

    Raises:
        ValueError: names the argument and those that there are.
    """
    if dtype not in RELATIVE:
        raise ValueError(f"{check} compares in torch.float64 or torch.float32, got dtype={dtype}")
