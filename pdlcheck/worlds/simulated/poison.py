"""Values that show at once that a buffer was read too early."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["poison"]


def poison(tensor: Tensor) -> None:
    """Fill with NaN; integers with their smallest value (unsigned: their largest), booleans with True.

    Written through ``.data``, so the version counter does not move.
    """
    if tensor.dtype == torch.bool:
        tensor.data.fill_(True)
    elif tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.data.fill_(limits.min or limits.max)
