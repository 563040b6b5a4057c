"""Tests of parallel PyTorch code that run on a simulated cluster, on local processes and on GPUs.

Importing this package is cheap: torch is imported by the modules that use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlcheck.tracing.recording import trace as trace
    from pdlcheck.watching.watcher import watch as watch

__all__ = ["__version__", "trace", "watch"]

__version__ = "0.1.0"

_IMPORTED_LATE = {"trace": "pdlcheck.tracing.recording", "watch": "pdlcheck.watching.watcher"}


def __getattr__(name: str) -> Any:
    """Import a function when it is first used."""
    if name not in _IMPORTED_LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_IMPORTED_LATE[name]), name)
