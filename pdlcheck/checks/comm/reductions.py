"""The reduce-ops: their result on one tensor of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.rounding import Rounding, kind_of, widened

__all__ = ["SUM", "Reduction", "reduction_of", "reductions_for"]


@dataclass(frozen=True)
class Reduction:
    """One reduce-op.

    Args:
        op: torch's reduce-op.
        noun: the name of its result, for messages.
        of_stack: reduces the first dimension.
        kinds: the dtypes that it takes, of "integer", "floating" and "complex".
        scale: the factor of ``world_size * eps`` in the largest error, in words; empty if nothing rounds.
    """

    op: dist.ReduceOp.RedOpType
    noun: str
    of_stack: Callable[[Tensor], Tensor]
    kinds: tuple[str, ...]
    scale: str = ""

    @property
    def name(self) -> str:
        """Return torch's name of the reduce-op, such as ``SUM``."""
        return str(self.op.name)

    def of(self, inputs: Sequence[Tensor], world_size: int | None = None) -> Tensor:
        """Return the result for some inputs, in their dtype.

        Args:
            inputs: the tensors of some or all ranks.
            world_size: the divisor of a mean; by default the number of inputs.
        """
        return self._of_wide(inputs, world_size).to(inputs[0].dtype)

    def rounding(self, inputs: Sequence[Tensor]) -> Rounding | None:
        """Return the largest error of a rank's result; None if nothing rounds, as for integers or in a maximum."""
        dtype = inputs[0].dtype
        if not self.scale or kind_of(dtype) == "integer":
            return None
        stack = torch.stack([widened(x) for x in inputs])
        finite = stack.isfinite()
        slack = len(inputs) * torch.finfo(dtype).eps * self.of_stack(stack.abs().masked_fill(~finite, 0.0))
        formula = f"world_size * eps * {self.scale}"
        return Rounding(self._of_wide(inputs, None), slack, ~finite.all(0), formula)

    def allowed(self, inputs: Sequence[Tensor]) -> Rounding | None:
        """Return :meth:`rounding`, or None if the inputs have the same sum in any order, as small integers do."""
        return None if self is SUM and _add_up_exactly(inputs) else self.rounding(inputs)

    def _of_wide(self, inputs: Sequence[Tensor], world_size: int | None) -> Tensor:
        value = self.of_stack(torch.stack([widened(x) for x in inputs]))
        if world_size is None or self.op != dist.ReduceOp.AVG:
            return value
        return value * len(inputs) / world_size


_ANY = ("integer", "floating", "complex")
_REAL = ("integer", "floating")

SUM = Reduction(dist.ReduceOp.SUM, "sum", lambda stack: stack.sum(0), _ANY, "sum(|x|)")
_ORDERED = (dist.ReduceOp.MAX, dist.ReduceOp.MIN)
_ALL = (
    SUM,
    Reduction(dist.ReduceOp.AVG, "mean", lambda stack: stack.mean(0), ("floating", "complex"), "mean(|x|)"),
    Reduction(dist.ReduceOp.MAX, "maximum", lambda stack: stack.amax(0), _REAL),
    Reduction(dist.ReduceOp.MIN, "minimum", lambda stack: stack.amin(0), _REAL),
    Reduction(dist.ReduceOp.PRODUCT, "product", lambda stack: stack.prod(0), _REAL, "|product|"),
)


def reduction_of(check: str, op: object, inputs: Sequence[Tensor]) -> Reduction:
    """Return the reduction for the argument ``op`` of a check.

    Raises:
        ValueError: the check does not support ``op``, or torch's own backends do not support it for these inputs.
    """
    dtype = inputs[0].dtype
    found = [one for one in _ALL if op == one.op]
    if not found:
        known = ", ".join(one.name for one in _ALL)
        raise ValueError(f"{check} knows the reduce-ops {known} of torch.distributed.ReduceOp, got op={op!r}")
    if kind_of(dtype) not in found[0].kinds:
        raise ValueError(
            f"{check}: ReduceOp.{found[0].name} takes {' and '.join(found[0].kinds)} tensors, got {dtype}; "
            "give inputs of another dtype, or draw them with rank_tensors(dtypes=[torch.float32])"
        )
    if found[0].op in _ORDERED and any(one.isnan().any() for one in inputs):
        raise ValueError(f"{check}: backends differ in the {found[0].noun} of NaN and numbers; give inputs without NaN")
    return found[0]


def reductions_for(dtype: torch.dtype) -> list[Reduction]:
    """Return the reductions that torch supports for a dtype."""
    return [one for one in _ALL if kind_of(dtype) in one.kinds]


def _add_up_exactly(inputs: Sequence[Tensor]) -> bool:
    """Return whether no order of adding rounds.

    That is so if the lowest bit of all terms and the sum of their magnitudes fit into one number of the dtype. It is
    also so where an input holds inf or NaN.
    """
    if kind_of(inputs[0].dtype) == "integer":
        return True
    dtype = inputs[0].dtype
    stack = torch.stack([torch.view_as_real(x) if x.is_complex() else x for x in inputs]).double()
    stack = stack.masked_fill(~stack.isfinite().all(0), 0.0)
    if not stack.numel():
        return True
    mantissa, exponent = torch.frexp(stack)
    whole = (mantissa * 2.0**53).long()
    lowest = torch.ldexp((whole & -whole).double(), exponent - 53).masked_fill(stack == 0, torch.inf).amin(0)
    return bool((stack.abs().sum(0) <= lowest * (2 / torch.finfo(dtype).eps)).all())
