"""The ``time.sleep`` of simulated ranks, which gives other ranks their turn.

A rank that waits in a loop for a file, or for a flag in memory, may need another rank to set it. No rank sleeps while
another can go on. If none can, the rank that wakes first sleeps as long as it requested, because its processes and
threads may need that time.
"""

from __future__ import annotations

import os
import threading
import time
from functools import wraps
from traceback import walk_stack

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.python.imports import IMPORT_FRAME
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["PATCHES"]

_real = time.sleep
_thread = threading.local()


@wraps(time.sleep)
def _sleep(seconds: float, /) -> None:
    __tracebackhide__ = True
    rank = current_rank()
    if rank is None or not isinstance(seconds, int | float) or not seconds >= 0 or _must_keep_turn():
        _real(seconds)
        return
    began = time.perf_counter()
    rank.engine.scheduler.sleep(seconds)
    _real(max(seconds - (time.perf_counter() - began), 0.0))


def _must_keep_turn() -> bool:
    """Return whether the calling thread must not give up its turn.

    A process that a rank has forked has no turns. In an import, other ranks would wait for the import lock.
    """
    if getattr(_thread, "is_forked", False):
        return True
    return any((frame.f_code.co_filename, frame.f_code.co_name) == IMPORT_FRAME for frame, _ in walk_stack(None))


PATCHES = (
    Patch(
        time,
        "sleep",
        lambda present: _sleep if present is _real else present,  # otherwise the program has its own
        "a simulated rank that sleeps gives the other ranks their turn",
        everywhere=True,
    ),
)


def _fork() -> None:
    _thread.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)
