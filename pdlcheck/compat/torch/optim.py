"""Optimizers, their schedulers, and loss scalers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdlcheck.compat.private import name, uses

__all__ = ["SCHEDULER_COUNTS", "overflows_of", "skips_overflows"]

SCHEDULER_COUNTS: Final = tuple(
    name(
        f"torch.optim.lr_scheduler.LRScheduler.{attribute}",
        "counts in a scheduler's state that are not compared",
        lost="check_resume reports counts that no learning rate depends on",
    ).attribute
    for attribute in ("_step_count", "_get_lr_called_within_step", "_is_initial")
)


@uses("torch.amp.GradScaler._per_optimizer_states", lost="DistributedGradScaler does not work")
def overflows_of(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> dict[torch.device, Tensor]:
    """Return a scaler's flags about overflows in the gradients of an optimizer, by device.

    FSDP's scaler reads the same attribute.
    """
    states: Any = scaler._per_optimizer_states
    found: dict[torch.device, Tensor] = states[id(optimizer)]["found_inf_per_device"]
    return found


@uses("torch.optim.SGD._step_supports_amp_scaling", lost="steps that a fused optimizer skips are counted as steps")
def skips_overflows(optimizer: Optimizer) -> bool:
    """Return whether an optimizer leaves out steps with overflows itself, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
