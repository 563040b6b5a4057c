"""The line of user code that an operation came from."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

__all__ = ["user_line"]

_INTERNAL = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,  # pdlcheck/worlds
    "<frozen",
)
_is_internal: dict[CodeType, bool] = {}


def user_line() -> str:
    """Return ``path:line`` of the innermost frame outside torch and the worlds; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        internal = _is_internal.get(code)
        if internal is None:
            internal = _is_internal[code] = code.co_filename.startswith(_INTERNAL)
        if not internal:
            return f"{_short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
