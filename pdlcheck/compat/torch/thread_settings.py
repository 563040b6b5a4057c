"""The settings that torch keeps by thread: the default device, and the stack of function modes."""

from __future__ import annotations

from typing import Any

import torch

from pdlcheck.compat.torch.modes import enter_function_mode, number_of_function_modes, pop_function_mode

__all__ = ["device_mode", "set_device_mode", "set_function_modes"]

_default_device: Any = vars(torch)["_GLOBAL_DEVICE_CONTEXT"]  # devices.py has it in the table of private names


def set_function_modes(modes: tuple[Any, ...]) -> None:
    """Replace the function modes of this thread; the outermost comes first."""
    while number_of_function_modes():
        pop_function_mode()
    for mode in modes:
        enter_function_mode(mode)


def device_mode() -> Any:
    """Return the mode that ``torch.set_default_device`` has entered on this thread; None if it has entered none."""
    return getattr(_default_device, "device_context", None)


def set_device_mode(mode: Any) -> None:
    """Set the mode that ``torch.set_default_device`` leaves when it is called again."""
    _default_device.device_context = mode
