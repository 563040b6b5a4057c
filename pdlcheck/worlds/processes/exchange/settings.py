"""What the controller's code has set of torch: a call of ranks begins with it, as it would in the controller."""

from __future__ import annotations

import sys
from typing import NamedTuple

__all__ = ["AS_TORCH_BEGINS", "Settings", "present", "put"]


class Settings(NamedTuple):
    """``dtype``: the default one, by its name."""

    dtype: str
    computes_gradients: bool
    is_deterministic: bool


AS_TORCH_BEGINS = Settings("float32", computes_gradients=True, is_deterministic=False)


def present() -> Settings:
    """Of this thread; a controller that has not imported torch has set nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "are_deterministic_algorithms_enabled"):  # nor while it is being imported
        return AS_TORCH_BEGINS
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return Settings(dtype, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())


def put(settings: Settings) -> None:
    """Let this thread have them."""
    import torch

    torch.set_default_dtype(getattr(torch, settings.dtype))
    torch.set_grad_enabled(settings.computes_gradients)
    torch.use_deterministic_algorithms(settings.is_deterministic)
