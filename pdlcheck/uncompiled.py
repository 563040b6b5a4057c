"""What ``torch.compile`` runs as it is written.

Dynamo traces every frame of Python below compiled code, also those that are entered from C++: hooks of a backward pass,
methods of a process group, handles that are waited for. There it finds locks and threads, takes a group for an opaque
object, and would keep in a graph what depends on the other ranks. What torch has of these is C++, which it cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["uncompiled", "uncompiled_frame"]

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(subject: F) -> F:
    """Run a function, or the methods of a class, as they are written, with all that they call."""
    for value in vars(subject).values() if isinstance(subject, type) else (subject,):
        if isinstance(value, FunctionType):
            _leave(value, "SKIP")
    return subject


def uncompiled_frame(fn: F) -> F:
    """Run a function as it is written; what it calls may be compiled."""
    _leave(fn, "DEFAULT")
    return fn


def _leave(fn: Any, what_it_calls: str) -> None:
    """Both for a frame that is entered, and for a call that is met while another one is traced."""
    if hasattr(eval_frame, "set_code_exec_strategy"):  # else a torch to come compiles them, and may do so rightly
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.__members__[what_it_calls])
        eval_frame.set_code_exec_strategy(fn.__code__, strategy)
    vars(fn).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it communicates")
