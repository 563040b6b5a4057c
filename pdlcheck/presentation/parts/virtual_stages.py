"""A pipeline whose stages compute in virtual time. It imports torch, which a report without pictures does not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.clock import compute
from pdlcheck.primitives import Pipeline

__all__ = ["step"]

_NUMEL = 250_000  # elements that a stage sends for each micro-batch


class _Compute(torch.autograd.Function):
    """A function that takes virtual seconds forwards, and twice as many backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        compute(2 * ctx.seconds)
        return grad, None


class _Stage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return _Compute.apply(x * self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def step(schedule: str, stages: int, microbatches: int, stage_s: float) -> None:
    """Run one step on each rank, after a first step without computing time that determines the shapes."""
    parts = [_Stage(0.0) for _ in range(stages)]
    x = torch.ones(microbatches, _NUMEL)
    pipeline = Pipeline(nn.Sequential(*parts), nn.MSELoss(), schedule=schedule, n_microbatches=microbatches)
    pipeline.step(x, x)
    for part in parts:
        part.seconds = stage_s
    pipeline.step(x, x)
