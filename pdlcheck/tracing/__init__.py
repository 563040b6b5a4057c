"""Traces of a training: recorded from a trusted and from a parallel run, and compared.

Importing this package is cheap: torch is imported when a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlcheck.tracing.comparison import Comparison, compare_traces
    from pdlcheck.tracing.errors import TraceError
    from pdlcheck.tracing.mapping import Mapping, Positions
    from pdlcheck.tracing.recording import trace

__all__ = ["Comparison", "Mapping", "Positions", "TraceError", "compare_traces", "trace"]

_HOMES = {
    "Comparison": "comparison",
    "Mapping": "mapping",
    "Positions": "mapping",
    "TraceError": "errors",
    "compare_traces": "comparison",
    "trace": "recording",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
