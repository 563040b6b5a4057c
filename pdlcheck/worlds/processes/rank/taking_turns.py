"""A thread of a rank that wakes up waits for its turn, and takes the core from no other.

gloo's thread for connections polls without a pause while another thread holds the lock of one. Where that other thread
was pushed off the core by the one that polls, it stays off until the scheduler's next tick, 4 ms for an operation of
0.2 ms; with as many ranks as cores, one operation in ten meets with that: docs/findings/gloo_polls.md.
"""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["take_turns"]


def take_turns() -> None:
    """For this thread and all that it will start; what an administrator or the user has chosen stays."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # where it is forbidden, ranks are as fast as gloo is
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
