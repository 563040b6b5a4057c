"""The settings that Python and torch keep by thread. Ranks start with the controller's settings.

Processes that import the controller's files would start with them too. These are: the default dtype, grad mode, the
default device, the torch-function modes that are entered, and context variables (numpy's error handling, decimal's
precision, and others).
"""

from __future__ import annotations

import contextvars
import decimal
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from pdlcheck.worlds.decimals import is_same
from pdlcheck.worlds.simulated.process_state import flags

__all__ = ["Settings", "of_controller", "own_variables", "present", "put", "put_variables", "remember_controllers"]

_ABSENT: Any = object()
_default_device: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT")  # noqa: B009 - torch's stubs leave it out
_c: Any = torch._C


class Settings(NamedTuple):
    """The settings of one thread."""

    dtype: torch.dtype
    computes_gradients: bool
    modes: tuple[Any, ...]
    device: Any  # the mode that `set_default_device` has entered
    flags: tuple[Any, ...]

    def is_as(self, other: Settings) -> bool:
        """Return whether no setting differs. Equal modes are the same objects."""
        same = self.dtype is other.dtype and self[1] == other[1] and self.flags == other.flags
        return same and _same(self.modes, other.modes)


def present() -> Settings:
    """Return the settings of this thread."""
    return Settings(
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        tuple(map(_c._get_function_stack_at, range(_c._len_torch_function_stack()))),
        getattr(_default_device, "device_context", None),
        flags.present(),
    )


def put(settings: Settings, *, dtype: bool = True) -> None:
    """Apply the settings to this thread, without the dtype if ``dtype`` is False."""
    if dtype and torch.get_default_dtype() is not settings.dtype:
        torch.set_default_dtype(settings.dtype)
    if torch.is_grad_enabled() is not settings.computes_gradients:
        torch.set_grad_enabled(settings.computes_gradients)
    if _c._len_torch_function_stack() or settings.modes:
        while _c._len_torch_function_stack():
            _c._pop_torch_function_stack()
        for mode in settings.modes:
            _c._push_on_torch_function_stack(mode)
    if getattr(_default_device, "device_context", None) is not settings.device:
        _default_device.device_context = settings.device
    flags.put(settings.flags)


def put_variables(context: contextvars.Context, since: Mapping[contextvars.ContextVar[Any], Any]) -> None:
    """Set, in the present context, the variables of ``context`` whose values differ from ``since``."""
    for variable, value in context.items():
        if since.get(variable, _ABSENT) is value or variable.get(_ABSENT) is value:
            continue
        if not isinstance(value, decimal.Context):
            variable.set(value)
        elif not is_same(value, decimal.getcontext()):
            decimal.setcontext(value.copy())


def own_variables(context: contextvars.Context) -> contextvars.Context:
    """Return a copy of ``context`` with a decimal context of its own, which ``decimal`` changes in place."""
    own = context.copy()
    own.run(_set_decimals, None)
    return own


def _set_decimals(seen: decimal.Context | None) -> decimal.Context:
    """Set the decimal context of the present context, and return it.

    It is ``seen`` if that has the same settings, else a copy of the present one.
    """
    now = decimal.getcontext()
    if seen is None or not is_same(now, seen):
        seen = now.copy()
    decimal.setcontext(seen)
    return seen


_controllers: tuple[Settings, contextvars.Context] | None = None
_decimals: decimal.Context | None = None  # a copy of the controller's decimal context


def remember_controllers() -> None:
    """Remember the controller's settings and context. Called in the controller at the start of a run."""
    global _controllers, _decimals
    variables = contextvars.copy_context()
    _decimals = variables.run(_set_decimals, _decimals)
    _controllers = present(), variables


def of_controller() -> tuple[Settings, contextvars.Context]:
    """Return the controller's settings and context at the start of the present run."""
    assert _controllers is not None
    return _controllers


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
