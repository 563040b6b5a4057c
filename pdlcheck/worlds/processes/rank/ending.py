"""The time that a rank gets to end its call by itself, after another rank has failed and this one must stop.

A rank that still runs its function gets a short time. A rank that leaves its function by an error gets longer, because
``finally`` blocks may have work to do. A rank that writes its report gets all the time of the call: the reported line
and values must not depend on the time that it takes to write them down. The times are the rank's own, and are counted
in its answers too. So the load of the machine does not shorten them.
"""

from __future__ import annotations

import math
import threading

from pdlcheck.time_budgets import BUSY_S, LEAVES_S

__all__ = ["begins", "grace_s", "note_error", "note_report"]

_grace_s = BUSY_S


def begins() -> None:
    """Reset the time at the start of a call."""
    global _grace_s
    _grace_s = BUSY_S


def note_error() -> None:
    """Record that an operation raises on this rank; only an error in the main thread ends a call."""
    global _grace_s
    if threading.current_thread() is threading.main_thread():
        _grace_s = max(_grace_s, LEAVES_S)


def note_report() -> None:
    """Record that the user's function has ended, and that only the report is left."""
    global _grace_s
    _grace_s = math.inf


def grace_s() -> float:
    """Return the seconds of its own time that the rank gets, counted from the controller's ``Stop``."""
    return _grace_s
