"""The torch modes, saved-tensor hooks and function transforms that a rank's code entered and did not leave.

torch keeps each kind on a stack of the thread. Code that pushes and does not pop changes the results of later tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pdlcheck.compat.torch.autograd import pop_saved_tensors_hooks, top_saved_tensors_hooks
from pdlcheck.compat.torch.modes import (
    number_of_dispatch_modes,
    number_of_function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_transforms,
    transforms,
)

__all__ = ["Modes", "are_left_on", "leave_above", "modes"]


class Modes(NamedTuple):
    """The depths of the stacks of ``TorchDispatchMode``, of ``TorchFunctionMode`` and of vmap, grad and the like.

    Args:
        dispatch: the depth of the stack of dispatch modes.
        function: the depth of the stack of function modes.
        transforms: the depth of the stack of vmap, grad and the like.
        hooks: the pair that ``saved_tensors_hooks`` set last; None if there is none.
    """

    dispatch: int
    function: int
    transforms: int
    hooks: Any


def modes() -> Modes:
    """Return the modes that are on in this thread."""
    return Modes(
        number_of_dispatch_modes(),
        number_of_function_modes(),
        len(transforms() or ()),
        top_saved_tensors_hooks(True),
    )


def are_left_on() -> bool:
    """Return whether any mode is on in this thread.

    Function modes do not count, because the default device is one of them.
    """
    now = modes()
    return now.dispatch > 0 or now.transforms > 0 or now.hooks is not None


def leave_above(held: Modes) -> None:
    """Leave the modes that were entered since ``held`` was taken; a mode that was left since then stays left."""
    now = modes()
    if now == held:
        return
    if now.transforms > held.transforms:
        pop_transforms(held.transforms)
    for _ in range(now.dispatch - held.dispatch):
        pop_dispatch_mode()
    for _ in range(now.function - held.function):
        pop_function_mode()
    while (hooks := top_saved_tensors_hooks(True)) is not None and hooks != held.hooks:
        pop_saved_tensors_hooks()
