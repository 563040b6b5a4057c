"""The scheduling of a rank's threads: a thread that wakes up waits for a core, and preempts no other thread.

gloo's thread for connections polls without a pause while another thread holds the lock of a connection. If the polling
thread has preempted that other thread, the other thread stays off the core until the scheduler's next tick. That is
4 ms for an operation of 0.2 ms. With as many ranks as cores, it happens to one operation in ten:
docs/findings/gloo_polls.md.
"""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["take_turns"]


def take_turns() -> None:
    """Schedule this thread, and all threads that it will start, as batch work.

    A policy that an administrator or the user has chosen stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # if it is forbidden, ranks are only as fast as gloo
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
