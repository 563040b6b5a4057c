"""The private names of torch's autograd: the running backward pass, its engine, and hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from pdlcheck.compat.private import name, take

__all__ = [
    "ENGINE",
    "RUN_BACKWARD",
    "ImperativeEngine",
    "call_after_backward",
    "current_node",
    "graph_task_id",
    "in_backward",
    "pop_saved_tensors_hooks",
    "top_saved_tensors_hooks",
]

_IN_HOOKS: Final = "an operation that a hook of a backward pass posts may never be waited for"

ENGINE: Final = name(
    "torch.autograd.Variable._execution_engine",
    "calls at the end of a backward pass, and the exchange of the engine on simulated ranks",
    lost="two simulated ranks that go backward through one parameter block for ever",
)
RUN_BACKWARD: Final = name(
    "torch.autograd._engine_run_backward",
    "the replacement of CUDA devices in hooks of a backward pass",
    lost="hooks that name CUDA devices fail under --cuda-as-cpu",
)

ImperativeEngine: Any = take(
    "torch._C._ImperativeEngine",
    "the base class of the engine of simulated ranks",
    lost="the simulated world",
)
graph_task_id: Any = take(
    "torch._C._current_graph_task_id", "whether a backward pass runs in this thread", lost=_IN_HOOKS
)
current_node: Any = take(
    "torch._C._current_autograd_node", "whether a backward pass has computed all gradients", lost=_IN_HOOKS
)
top_saved_tensors_hooks: Any = take(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "the hooks that saved_tensors_hooks has set last",
    lost="hooks of saved tensors that a test leaves set act on later tests",
)
pop_saved_tensors_hooks: Any = take(
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "the removal of hooks that a test has left set",
    lost="hooks of saved tensors that a test leaves set act on later tests",
)


def in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return graph_task_id() != -1  # type: ignore[no-any-return]


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # the present engine, which a world may replace
