"""The torch settings of the controller's code, with which a call on the ranks begins."""

from __future__ import annotations

import sys
from typing import NamedTuple

__all__ = ["AS_TORCH_BEGINS", "Settings", "present", "put"]


class Settings(NamedTuple):
    """The settings of torch; ``dtype`` is the name of the default dtype."""

    dtype: str
    computes_gradients: bool
    is_deterministic: bool


AS_TORCH_BEGINS = Settings("float32", computes_gradients=True, is_deterministic=False)


def present() -> Settings:
    """Return the settings of this thread; a controller that has not imported torch has changed nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "are_deterministic_algorithms_enabled"):  # absent during the import of torch
        return AS_TORCH_BEGINS
    dtype = str(torch.get_default_dtype()).removeprefix("torch.")
    return Settings(dtype, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())


def put(settings: Settings) -> None:
    """Apply the settings to this thread."""
    import torch

    torch.set_default_dtype(getattr(torch, settings.dtype))
    torch.set_grad_enabled(settings.computes_gradients)
    torch.use_deterministic_algorithms(settings.is_deterministic)
