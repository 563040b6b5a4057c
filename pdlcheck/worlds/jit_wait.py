"""A ``torch.jit.wait`` that also works for futures of operations written in Python."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.torch.jit import WAIT

__all__ = ["PATCHES"]


def _in_python(wait_in_cpp: Any) -> Any:
    """Return a ``torch.jit.wait`` that calls the ``wait`` method of the future.

    torch's own function waits in C++ and holds the interpreter lock, so no Python code can resolve the future.
    """

    @wraps(wait_in_cpp)
    def wait(future: torch.Future[Any], /) -> Any:
        return future.wait() if isinstance(future, torch.Future) else wait_in_cpp(future)

    return wait


PATCHES = (
    Patch(WAIT.owner, WAIT.attribute, _in_python, "torch.jit.wait blocks the thread that would resolve the future"),
)
