"""The private names of the start method of multiprocessing."""

from __future__ import annotations

from typing import Any, Final

from pdlcheck.compat.private import take, uses

__all__ = [
    "set_start_context",
    "start_context",
]

_STARTS: Final = "simulated ranks share the start method of multiprocessing"
_starts: Any = take(
    "multiprocessing.context._default_context",
    "a start method of multiprocessing for each simulated rank",
    lost=_STARTS,
)


@uses("multiprocessing.context.DefaultContext._actual_context", lost=_STARTS)
def start_context() -> Any:
    """Return the context of the start method that the program has set; None if it has set none."""
    return _starts._actual_context


def set_start_context(context: Any) -> None:
    """Set the start method of multiprocessing, by a context that :func:`start_context` has returned."""
    _starts._actual_context = context
