"""Functions that are exchanged for ours, also where other modules have imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["rebind"]


def rebind(real: Callable[..., Any], ours: Callable[..., Any], *, but: str) -> None:
    """Modules that have imported the function by its name, as ``torch.distributed`` and test files, get ours."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == but:
            continue
        for name, value in list(vars(module).items()):
            if value is real:
                setattr(module, name, ours)
