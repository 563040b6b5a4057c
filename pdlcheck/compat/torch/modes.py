"""The private names of torch's modes: the stacks of dispatch and function modes, and of function transforms."""

from __future__ import annotations

from typing import Any, Final

from pdlcheck.compat.private import take, uses

__all__ = [
    "DisableTorchDispatch",
    "TorchDispatchMode",
    "disable_current_modes",
    "dispatch_modes",
    "enter_below",
    "enter_function_mode",
    "function_modes",
    "has_function_mode",
    "leave_below",
    "leave_function_mode",
    "number_of_dispatch_modes",
    "number_of_function_modes",
    "pop_dispatch_mode",
    "pop_function_mode",
    "pop_transforms",
    "transforms",
]

_LEFT_ON: Final = "modes that a test leaves on act on later tests"
_HAZARDS: Final = "the simulated world does not detect accesses to buffers of pending operations"
_CUDA: Final = "--cuda-as-cpu"

# -- dispatch modes --------------------------------------------------------------------------------

TorchDispatchMode: Any = take(
    "torch.utils._python_dispatch.TorchDispatchMode",
    "the base class of the mode that detects accesses to buffers of pending operations",
    lost="the simulated world",
)
DisableTorchDispatch: Any = take(
    "torch._C._DisableTorchDispatch",
    "pdlcheck's own work on tensors, which modes of the program must not see",
    lost="modes of the program count and change the work of the simulated network",
)
disable_current_modes: Any = take(
    "torch.utils._python_dispatch._disable_current_modes",
    "copies and comparisons of globals while modes of the program are on",
    lost="the simulated world cannot give each rank its own module globals",
)
dispatch_modes: Any = take(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "the dispatch modes that are on", lost=_HAZARDS
)
number_of_dispatch_modes: Any = take(
    "torch._C._len_torch_dispatch_stack", "the depth of the stack of dispatch modes", lost=_LEFT_ON
)
pop_dispatch_mode: Any = take(
    "torch.utils._python_dispatch._pop_mode", "the end of a dispatch mode that a test has left on", lost=_LEFT_ON
)
_push_dispatch_mode: Any = take(
    "torch.utils._python_dispatch._push_mode", "the entry of a dispatch mode below those of the program", lost=_HAZARDS
)


def enter_below(mode: Any) -> None:
    """Put a dispatch mode below all modes of the program, if it is not on."""
    stack = dispatch_modes()
    if mode in stack:
        return
    above = _of_program(stack)
    for _ in above:
        pop_dispatch_mode()
    for one in [mode, *above]:
        _push_dispatch_mode(one)


def leave_below(mode: Any) -> None:
    """End a dispatch mode that may lie below modes of the program, if it is on."""
    stack = dispatch_modes()
    if mode not in stack:
        return
    others = _of_program(stack)
    for _ in others:
        pop_dispatch_mode()
    for one in others:
        if one is not mode:
            _push_dispatch_mode(one)


@uses("torch._subclasses.fake_tensor.FakeTensorMode._mode_key", lost=_HAZARDS)
def _of_program(stack: list[Any]) -> list[Any]:
    """Leave torch's own modes, such as that of fake tensors, where they are."""
    return [mode for mode in stack if getattr(mode, "_mode_key", None) is None]


# -- function modes --------------------------------------------------------------------------------

function_modes: Any = take(
    "torch.overrides._get_current_function_mode_stack", "the function modes that are on", lost=_CUDA
)
number_of_function_modes: Any = take(
    "torch._C._len_torch_function_stack", "the depth of the stack of function modes", lost=_LEFT_ON
)
pop_function_mode: Any = take(
    "torch.overrides._pop_mode", "the end of a function mode that a test has left on", lost=_LEFT_ON
)
_function_mode_at: Any = take(
    "torch._C._get_function_stack_at", "whether the mode of --cuda-as-cpu is on already", lost=_CUDA
)
_push_function_mode: Any = take(
    "torch._C._push_on_torch_function_stack", "the entry of the mode of --cuda-as-cpu", lost=_CUDA
)
_pop_any_function_mode: Any = take(
    "torch._C._pop_torch_function_stack", "the end of the mode of --cuda-as-cpu", lost=_CUDA
)


def has_function_mode(kind: type) -> bool:
    """Return whether a function mode of exactly this class is on in this thread."""
    return any(type(_function_mode_at(place)) is kind for place in range(number_of_function_modes()))


def enter_function_mode(mode: Any) -> None:
    """Put a function mode on top of the stack of this thread."""
    _push_function_mode(mode)


def leave_function_mode(mode: Any) -> None:
    """End a function mode; those that were entered above it stay on."""
    above = []
    while number_of_function_modes():
        top = _pop_any_function_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_function_mode(other)


# -- function transforms ---------------------------------------------------------------------------

transforms: Any = take(
    "torch._C._functorch.get_interpreter_stack", "the transforms (vmap, grad and the like) that are on", lost=_LEFT_ON
)
pop_transforms: Any = take(
    "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
    "the end of transforms that a test has left on",
    lost=_LEFT_ON,
)
