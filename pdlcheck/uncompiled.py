"""Code that ``torch.compile`` must run as it is written.

Dynamo traces every Python frame below compiled code, including frames that C++ enters: hooks of a backward pass,
methods of a process group, and handles that are waited for. In these frames it finds locks and threads, treats a group
as an opaque object, and would store in a graph values that depend on the other ranks. torch's own versions of these
functions are C++, which Dynamo does not trace.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from pdlcheck.compat.torch.dynamo import skip_frames

__all__ = ["uncompiled", "uncompiled_frame"]

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(subject: F) -> F:
    """Run a function, or the methods of a class, as they are written, together with everything that they call."""
    for value in vars(subject).values() if isinstance(subject, type) else (subject,):
        if isinstance(value, FunctionType):
            skip_frames(value, "SKIP")
    return subject


def uncompiled_frame(fn: F) -> F:
    """Run a function as it is written; what it calls may be compiled."""
    skip_frames(fn, "DEFAULT")
    return fn
