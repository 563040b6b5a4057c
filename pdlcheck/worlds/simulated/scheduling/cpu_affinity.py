"""The placement of all ranks on one core, where a turn passes several times faster. Only one rank runs at a time.

Between cores, each turn would have to wake a sleeping core. A rank computes with one thread for the same reason. Its
sums therefore do not depend on the number of cores either.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["pinned_to_one_core", "use_batch_policy"]

_all_cores: set[int] | None = None  # the cores of the thread that is kept on one of them
_thread = threading.local()


def _current_core() -> Callable[[], int] | None:
    """Return a function that returns the core of the calling thread.

    None if the system has no such call, or cannot keep a thread on a core.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    return getattr(ctypes.CDLL(None), "sched_getcpu", None)


_core = _current_core()


@contextmanager
def pinned_to_one_core() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on its present core while the block runs."""
    global _all_cores
    before = os.sched_getaffinity(0) if _core is not None else set()
    if _core is None or len(before) == 1 or (here := _core()) not in before:
        yield
        return
    os.sched_setaffinity(0, {here})
    _all_cores = before
    try:
        yield
    finally:
        _all_cores = None
        os.sched_setaffinity(0, before)


def use_batch_policy() -> None:
    """Have the system wake the calling thread only when the thread that woke it goes to sleep.

    The thread that passes the turn still holds the interpreter lock. A thread that ran at once would only wait for the
    lock. Without that wait, a turn takes half as long.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            _thread.is_batch = True


def _give_back() -> None:
    if _all_cores is not None:
        os.sched_setaffinity(0, _all_cores)
    if getattr(_thread, "is_batch", False):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


if _core is not None:
    os.register_at_fork(after_in_child=_give_back)  # for example in a DataLoader worker of a rank
