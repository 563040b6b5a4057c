"""The end of an idle rank: it still runs the functions that user code registered with ``atexit``.

A rank that does not serve another call is killed instead. So the functions in ``after_calls`` run after each call, and
save what must outlive the rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from pdlcheck.compat.python.exits import living_finalizers, run_exit_functions

__all__ = ["after_calls", "end", "end_call", "finalizers"]

after_calls: list[Callable[[], object]] = []

_TORCH = "torch.library"


def finalizers() -> list[Any]:
    """Return the ``weakref.finalize`` objects that run at the end of the process, except those of torch's operators.

    torch needs nearly half a millisecond to unregister an operator, and there are hundreds.
    """
    return [one for one in living_finalizers() if one.atexit and not _is_torchs(one)]


def end_call() -> None:
    """Call the functions in ``after_calls``; the user's function has ended, and its end is not reported yet."""
    for callback in after_calls:
        with suppress(Exception):  # a function that is also registered with atexit runs once more at the end
            callback()


def end() -> NoReturn:
    """Run the functions and finalizers of the process's end, except those of torch's operators, and end the process."""
    for one in living_finalizers():
        if _is_torchs(one):
            one.atexit = False
    run_exit_functions()
    os._exit(0)


def _is_torchs(finalizer: Any) -> bool:
    known = finalizer.peek()
    return known is not None and getattr(known[1], "__module__", None) == _TORCH
