"""Hooks of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pdlcheck.compat.private import uses

__all__ = ["accumulation_hooks"]


@uses("torch.Tensor._post_accumulate_grad_hooks", lost="DistributedDataParallel may reduce gradients too early")
def accumulation_hooks(parameter: Tensor) -> dict[int, Any]:
    """Return the table of hooks that run when a gradient is complete, to see that the reducer's is still the last."""
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks
