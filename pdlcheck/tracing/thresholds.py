"""Thresholds: how far rounding alone may move a tensor.

A tensor is judged by two distances. ``norm`` is the root mean square of the differences relative to that of the trusted
tensor: it shows what is wrong a little everywhere. ``peak`` is the largest difference relative to the largest trusted
element: it shows one wrong row of many.

With perturbed runs, a limit is ``FACTOR`` times the distance to them. Without, it is a constant of the dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Distance", "Scale", "Thresholds", "measure", "narrowest", "scale_of"]

FACTOR = 5.0  # the noise of a perturbed run is drawn once; the order of sums in a parallel run is another draw
DEFAULT = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.15}
SMALL = {torch.float64: 0.05, torch.float32: 0.05, torch.float16: 0.1, torch.bfloat16: 0.1}
_SMALL_PERTURBED = 1e-6  # of the largest tensor of its kind: smaller ones are noise, as the gradient of a key's bias


@dataclass(frozen=True)
class Distance:
    """The distance of a piece from the trusted tensor."""

    norm: float
    peak: float

    def over(self, limit: Distance) -> float:
        """Return how many times the limit this distance is."""
        return max(_ratio(self.norm, limit.norm), _ratio(self.peak, limit.peak))


@dataclass(frozen=True)
class Scale:
    """The size of a trusted tensor: the root mean square and the largest absolute value."""

    rms: float
    peak: float

    def at_least(self, other: Scale, share: float) -> Scale:
        """Return this size, or a share of another one if that is larger."""
        return Scale(max(self.rms, share * other.rms), max(self.peak, share * other.peak))


def scale_of(tensor: Tensor) -> Scale:
    """Return the size of the finite elements of a tensor."""
    held = tensor.double()
    held = held if bool(held.isfinite().all()) else held[held.isfinite()]
    return Scale(float(held.square().mean().sqrt()), float(held.abs().max())) if held.numel() else Scale(0.0, 0.0)


def measure(found: Tensor, goal: Tensor, scale: Scale, mask: Tensor | None = None) -> Distance:
    """Return the distance of ``found`` from ``goal``, relative to ``scale``; elements outside ``mask`` do not count."""
    found, goal = found.double(), goal.double()
    if not found.numel() or torch.equal(found, goal):
        return Distance(0.0, 0.0)
    apart = (found - goal).abs()
    if not bool(apart.isfinite().all()):
        apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
        apart = apart.masked_fill((found == goal) | (found.isnan() & goal.isnan()), 0.0)
    if mask is not None:
        apart = apart.masked_fill(~mask, 0.0)
    return Distance(_ratio(float(apart.square().mean().sqrt()), scale.rms), _ratio(float(apart.max()), scale.peak))


def narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the floating dtype with the largest rounding errors."""
    return max(dtypes & DEFAULT.keys() or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Thresholds:
    """The limits for one comparison.

    Args:
        dtype: the narrowest dtype of the outputs of both runs.
        widening: how much larger its rounding is than that of the perturbed run.
        is_estimated: there are perturbed runs.
    """

    dtype: torch.dtype
    is_estimated: bool
    widening: float = 1.0

    @property
    def small(self) -> float:
        """The share of the largest tensor of a kind below which a tensor may be nothing but noise."""
        return _SMALL_PERTURBED if self.is_estimated else SMALL[self.dtype]

    def limit(self, perturbed: list[Distance]) -> Distance:
        """Return the limit of a tensor, from its distance in each perturbed run."""
        if not self.is_estimated:
            return Distance(DEFAULT[self.dtype], DEFAULT[self.dtype])
        least = torch.finfo(self.dtype).eps
        return Distance(
            FACTOR * max([least, *(self.widening * one.norm for one in perturbed)]),
            FACTOR * max([least, *(self.widening * one.peak for one in perturbed)]),
        )

    def exact(self) -> Distance:
        """Return the limit for what is not computed: parameters before the first step, inputs."""
        least = 2 * torch.finfo(self.dtype).eps
        return Distance(least, least)


def _ratio(one: float, other: float) -> float:
    return one / other if other else float("inf") if one else 0.0
