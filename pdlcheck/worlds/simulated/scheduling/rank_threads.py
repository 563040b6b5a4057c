"""Threads that a simulated rank starts: they see the groups of that rank, and must not communicate.

A rank is one thread, and a schedule chooses what it does next. An operation of another thread would bypass the
schedule. It therefore ends the run, even if the thread catches the error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from pdlcheck.compat.patches import Patch
from pdlcheck.worlds.observe import user_line

__all__ = ["follow_threads", "raise_in", "rank_behind", "started_at"]

_NAME = "_pdlcheck_rank"
_LINE = "_pdlcheck_started_at"


def follow_threads(current_rank: Callable[[], Any]) -> Patch:
    """Return the patch that records, for each new thread, the rank that started it.

    Args:
        current_rank: returns the rank of a rank's thread.
    """

    def follow(start_thread: Any) -> Any:
        @wraps(start_thread)
        def start(self: threading.Thread) -> None:
            rank = current_rank() or rank_behind()
            if rank is not None:
                setattr(self, _NAME, rank)
                setattr(self, _LINE, user_line() or started_at())
            start_thread(self)

        return start

    return Patch(threading.Thread, "start", follow, "a thread sees the groups of the simulated rank that started it")


def rank_behind() -> Any:
    """Return the rank that has started this thread, itself or through other threads; None in the rank's own thread."""
    return getattr(threading.current_thread(), _NAME, None)


def started_at() -> str:
    """Return the user's line that has started this thread, itself or through other threads."""
    return getattr(threading.current_thread(), _LINE, "")


def raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise ``error`` in a thread that runs Python code; in a thread inside a C call, when that call returns."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))
