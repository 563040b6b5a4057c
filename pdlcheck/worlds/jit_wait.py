"""``torch.jit.wait`` waits as the ``wait`` of the future does."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

__all__ = ["jit_waits_as_the_future"]

_wait_in_cpp = torch._C.wait


@wraps(_wait_in_cpp)
def _wait(future: torch._C.Future[Any], /) -> Any:
    return future.wait() if isinstance(future, torch._C.Future) else _wait_in_cpp(future)


def jit_waits_as_the_future() -> None:
    """From now on, also for futures of operations that are written in Python.

    torch's own waits in C++ and keeps the interpreter's lock, so that nothing in Python can ever resolve the future.
    """
    torch._C.wait = _wait  # type: ignore[assignment]  # the decorator hides what it decorates
