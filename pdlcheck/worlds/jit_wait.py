"""``torch.jit.wait`` waits as the ``wait`` of the future does."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from pdlcheck.compat.patches import Patch

__all__ = ["PATCHES"]


def _in_python(wait_in_cpp: Any) -> Any:
    """Return a ``torch.jit.wait`` that waits as the ``wait`` of the future does.

    torch's own waits in C++ and keeps the interpreter's lock, so that nothing in Python can ever resolve the future.
    """

    @wraps(wait_in_cpp)
    def wait(future: torch._C.Future[Any], /) -> Any:
        return future.wait() if isinstance(future, torch._C.Future) else wait_in_cpp(future)

    return wait


PATCHES = (Patch(torch._C, "wait", _in_python, "torch.jit.wait blocks the thread that would resolve the future"),)
