"""The rounding error that a rank's value may have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdlcheck.checks.message import show

__all__ = ["Rounding", "kind_of", "widened"]

_WIDEST = {"complex": torch.complex128, "floating": torch.float64, "integer": torch.int64}


@dataclass(frozen=True)
class Rounding:
    """An exact value in the widest dtype of its kind, and the largest error of a rank's value.

    Args:
        exact: the value.
        slack: the largest error of each element.
        special: where an input is inf or NaN. No order of adding changes whether the result is inf or NaN there.
        formula: the formula of the largest error, for messages.
    """

    exact: Tensor
    slack: Tensor
    special: Tensor
    formula: str

    def excludes(self, found: Tensor) -> Tensor:
        """Return where ``found`` is off by more than the largest error.

        A value that is too large for its dtype may be infinite, or the largest number of the dtype.
        """
        limit = torch.finfo(found.dtype).max
        here, there = (torch.view_as_real(widened(x)) if x.is_complex() else widened(x) for x in (found, self.exact))
        slack, special = ((x.unsqueeze(-1) if found.is_complex() else x) for x in (self.slack, self.special))
        same = (here == there) | (here.isnan() & there.isnan())
        near = (here.clamp(-limit, limit) - there.clamp(-limit, limit)).abs() <= slack
        off = ~torch.where(special & ~there.isfinite(), same, same | near)
        return off.any(-1) if found.is_complex() else off

    def told(self, at: tuple[int, ...]) -> str:
        """Return the largest error of one element, in words."""
        return f"{show(self.slack[at])} = {self.formula}"


def kind_of(dtype: torch.dtype) -> str:
    """Return ``complex``, ``floating`` or ``integer``."""
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def widened(tensor: Tensor) -> Tensor:
    """Return the tensor in the widest dtype of its kind."""
    return tensor.to(_WIDEST[kind_of(tensor.dtype)])
