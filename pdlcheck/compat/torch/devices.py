"""The private names of torch's devices."""

from __future__ import annotations

from typing import Any, Final

import torch

from pdlcheck.compat.private import name, take, uses

__all__ = [
    "CAST",
    "FACTORY_UNDER_DEFAULT_DEVICE",
    "default_device",
    "default_devices",
    "device_constructors",
    "is_built",
    "is_used_before_fork",
    "parse_to",
]

_CUDA: Final = "torch.set_default_device and torch.device blocks under --cuda-as-cpu"

CAST: Final = name(
    "torch.amp.autocast_mode._cast",
    "the casts of torch.amp.custom_fwd where CUDA code runs on the CPU",
    lost="functions with torch.amp.custom_fwd under --cuda-as-cpu",
)
FACTORY_UNDER_DEFAULT_DEVICE: Final = name(
    "torch.utils._device.DeviceContext.__torch_function__",
    "factory functions under a default device of CUDA where CUDA code runs on the CPU",
    lost=_CUDA,
)

parse_to: Any = take(
    "torch._C._nn._parse_to",
    "Module.to where CUDA code runs on the CPU",
    lost="--cuda-as-cpu",
)
is_used_before_fork: Any = take(
    "torch.cuda._is_in_bad_fork",
    "whether the process that forked this one has used CUDA",
    lost="ranks with CUDA",
)


@uses("torch.cuda._is_compiled", "torch.mtia._is_compiled", "torch.xpu._is_compiled", lost="ranks of processes")
def is_built(kind: Any) -> bool:
    """Return whether torch was built with a kind of device, so that its random streams exist.

    Args:
        kind: ``torch.cuda``, ``torch.mtia`` or ``torch.xpu``.
    """
    return bool(kind._is_compiled())


@uses("torch._GLOBAL_DEVICE_CONTEXT", lost="a default device that a test leaves set acts on later tests")
def default_device() -> torch.device | None:
    """Return the device of ``torch.set_default_device`` in this thread, to restore it; None if there is none."""
    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


# These import torch.utils._device only when they are called, as torch itself does.


@uses("torch.utils._device._device_constructors", lost=_CUDA)
def device_constructors() -> Any:
    """Return the factory functions, which take the default device."""
    from torch.utils import _device

    return _device._device_constructors()


@uses("torch.utils._device.DeviceContext", lost=_CUDA)
def default_devices() -> list[torch.device]:
    """Return the devices of ``torch.set_default_device`` and of ``torch.device`` blocks, innermost last."""
    from torch.utils._device import DeviceContext

    from pdlcheck.compat.torch.modes import function_modes

    return [mode.device for mode in function_modes() if isinstance(mode, DeviceContext)]
