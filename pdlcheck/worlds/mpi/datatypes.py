"""The MPI datatypes and operations for tensors and reduce-ops, with conversions where MPI has no equivalent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdlcheck.worlds.mpi.library import MPI

__all__ = ["Reduction", "memory", "raw", "reduction"]

_NUMBERS = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_BY_WIDTH = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}

_ARITHMETIC = {
    "AVG": MPI.SUM,
    "MAX": MPI.MAX,
    "MIN": MPI.MIN,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "SUM": MPI.SUM,
}
_BITWISE = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
_TRUTH = {  # the meaning of torch's arithmetic on booleans
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
    "MAX": MPI.BOR,
    "MIN": MPI.BAND,
    "PRODUCT": MPI.BAND,
    "SUM": MPI.BOR,
}
_COMPLEX = frozenset({"AVG", "PREMUL_SUM", "PRODUCT", "SUM"})


def raw(tensor: Tensor) -> list[Any]:
    """Return a contiguous tensor as a buffer that MPI moves without interpreting it."""
    return [memory(tensor), tensor.numel(), _BY_WIDTH[tensor.element_size()]]


def memory(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor, without a copy."""
    nbytes = tensor.numel() * tensor.element_size()
    return MPI.buffer.fromaddress(tensor.data_ptr(), nbytes)


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduce-op on one dtype.

    Args:
        op: the operation of MPI.
        dtype: dtype of the computation; it differs from the tensors' dtype if MPI does not support that one.
        prepare: applied by each rank to its contribution; None if the contribution is sent unchanged.
        conclude: applied in place to the result, before its dtype is restored; None if the result needs no change.
    """

    op: MPI.Op
    dtype: torch.dtype
    prepare: Callable[[Tensor], Tensor] | None
    conclude: Callable[[Tensor], object] | None

    def numbers(self, tensor: Tensor) -> list[Any]:
        """Return a contiguous tensor of ``dtype`` as a buffer that MPI reduces."""
        return [memory(tensor), tensor.numel(), _NUMBERS[self.dtype]]


def reduction(dtype: torch.dtype, reduce_op: Any, world_size: int) -> Reduction:
    """Return the reduction for a reduce-op on a dtype.

    Half precision and bfloat16 are added in float32 and rounded once. Booleans are bytes of 0 and 1.

    Raises:
        ValueError: the reduce-op is not defined for this dtype.
    """
    kind, factor = reduce_op.__getstate__()
    name = kind.name
    if dtype is torch.bool:
        _require(name in _TRUTH, name, dtype, "BAND, BOR, BXOR, MAX, MIN, PRODUCT or SUM")
        return Reduction(_TRUTH[name], torch.uint8, lambda tensor: tensor.to(torch.uint8), None)
    if name in _BITWISE:
        return Reduction(_BITWISE[name], dtype, None, None)
    _require(name in _ARITHMETIC, name, dtype, "another reduce-op")
    _require(not dtype.is_complex or name in _COMPLEX, name, dtype, "torch.view_as_real")
    compute = dtype if dtype in _NUMBERS else torch.float32
    prepare: Callable[[Tensor], Tensor] | None = None
    conclude: Callable[[Tensor], object] | None = None
    if name == "PREMUL_SUM":
        prepare = lambda tensor: (tensor * factor).to(compute)  # noqa: E731
    elif compute is not dtype:
        prepare = lambda tensor: tensor.to(compute)  # noqa: E731
    if name == "AVG":
        conclude = lambda tensor: tensor.div_(world_size)  # noqa: E731
    return Reduction(_ARITHMETIC[name], compute, prepare, conclude)


def _require(holds: bool, name: str, dtype: torch.dtype, cure: str) -> None:
    if not holds:
        raise ValueError(f"ReduceOp.{name} has no meaning on {dtype}; use {cure}")
