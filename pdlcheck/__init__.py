"""Tests of parallel PyTorch code that run on a simulated cluster, on local processes and on GPUs.

Importing this package is cheap: torch is imported by the modules that use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlcheck.watching.watcher import watch as watch

__all__ = ["__version__", "watch"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import :func:`pdlcheck.watching.watch` when it is first used."""
    if name != "watch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pdlcheck.watching.watcher import watch

    return watch
