"""The user's line that raised an exception.

This module does not import torch.
"""

from __future__ import annotations

import os
import runpy
from traceback import walk_tb

__all__ = ["is_ours", "site_of"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = tuple(os.path.join(_PACKAGE, folder) + os.sep for folder in ("harness", "item_runners", "scripts", "worlds"))
_CALLERS = ("<frozen runpy>", runpy.__file__)  # run a script for pdlcheck


def is_ours(path: str) -> bool:
    """Return whether ``path`` is one of pdlcheck's files that run user code on ranks."""
    return path.startswith(_OURS) or path in _CALLERS


def site_of(error: BaseException) -> str:
    """Return ``path:line`` of the innermost frame outside those files; empty if there is none."""
    site = ""
    for frame, line in walk_tb(error.__traceback__):
        if not is_ours(frame.f_code.co_filename):
            site = f"{frame.f_code.co_filename}:{line}"
    return site
