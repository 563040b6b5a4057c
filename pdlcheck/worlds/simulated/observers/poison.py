"""Poison in the buffers of pending operations, which shows at once that a buffer was read too early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.compat.torch.modes import DisableTorchDispatch
from pdlcheck.compat.torch.tensors import sparse_values
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["Poison"]


class Poison(Observer):
    """The poison of one run.

    Args:
        partial_sums: whether a ``reduce`` leaves partial sums on ranks that are not its destination, as on gloo. No
            program can use them. NCCL leaves the tensor unchanged.
    """

    def __init__(self, *, partial_sums: bool) -> None:
        self._partial_sums = partial_sums

    def pending(self, work: SimulatedWork) -> None:
        """Poison the outputs, until the rank has waited."""
        if outputs := work.operation.method.kind.writes(work.operation):
            work.hold_back(outputs)
            _poison(outputs)

    def finished(self, work: SimulatedWork) -> None:
        """Poison the tensor in which a ``reduce`` leaves partial sums."""
        signature, kind = work.operation.signature, work.operation.method.kind
        if kind.leaves_partial_sums and signature.root != signature.rank and work.matched and self._partial_sums:
            _poison(kind.reads(work.operation))


def _poison(tensors: Sequence[Tensor]) -> None:
    with DisableTorchDispatch():  # hides this from the modes of the rank
        for tensor in tensors:
            _fill(tensor)


def _fill(tensor: Tensor) -> None:
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
