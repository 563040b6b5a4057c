"""The private names of the start method of multiprocessing."""

from __future__ import annotations

import multiprocessing
from typing import Any, Final

from pdlcheck.compat.private import take, uses

__all__ = [
    "adopt",
    "call_of",
    "set_start_context",
    "start_context",
    "start_method_of",
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


_PROCESSES: Final = "pdlcheck run takes the processes that a script starts for its ranks"


@uses("multiprocessing.process.BaseProcess._popen", lost=_PROCESSES)
def adopt(process: Any, popen: Any) -> None:
    """Make ``popen`` stand for the operating system's process of a ``Process`` that does not start one."""
    process._popen = popen


@uses(*[f"multiprocessing.process.BaseProcess.{name}" for name in ("_target", "_args", "_kwargs")], lost=_PROCESSES)
def call_of(process: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the function that a ``Process`` calls, with its arguments; None in place of it for a subclass."""
    return process._target, process._args, process._kwargs


@uses("multiprocessing.context.ForkProcess._start_method", lost=_PROCESSES)
def start_method_of(process: Any) -> str:
    """Return how a ``Process`` is started: ``fork``, ``spawn`` or ``forkserver``."""
    return getattr(process, "_start_method", None) or multiprocessing.get_start_method()
