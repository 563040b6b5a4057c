"""The values of poison, which show at once that a buffer was read too early."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlcheck.compat.torch.tensors import sparse_values

__all__ = ["poison"]


def poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN, integers with their smallest value (unsigned: their largest), and booleans with True.

    In a sparse tensor, the values are filled. The write goes through ``.data``, so the version counter does not change.
    """
    dtype = tensor.dtype
    value = _VALUES.get(dtype)
    if value is None:
        value = _VALUES[dtype] = _value(dtype)
    (tensor if tensor.layout == torch.strided else sparse_values(tensor)).data.fill_(value)


def _value(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    limits = torch.iinfo(dtype)
    return limits.min or limits.max


_VALUES: dict[torch.dtype, float | int | bool] = {}
