"""How far the end of the present call is on its way, where another rank has failed and this one is told to stop.

A rank that goes on with something else is given a moment. One that leaves its function by an error is given longer, as
``finally`` blocks may have work to do, and one that writes its report has all the time of the call: which line and
which values are shown must not depend on how long it takes to write them down.
"""

from __future__ import annotations

import math
import threading

__all__ = ["begins", "grace_s", "note_error", "note_report"]

_BUSY_S = 0.25
_LEAVES_S = 2.0
_grace_s = _BUSY_S


def begins() -> None:
    """A call begins."""
    global _grace_s
    _grace_s = _BUSY_S


def note_error() -> None:
    """An operation raises on this rank. Other threads than the main one end no call."""
    global _grace_s
    if threading.current_thread() is threading.main_thread():
        _grace_s = max(_grace_s, _LEAVES_S)


def note_report() -> None:
    """The user's function has ended; what is left is to report it."""
    global _grace_s
    _grace_s = math.inf


def grace_s() -> float:
    """Seconds of its own time that the rank is given from the moment when it was told to stop."""
    return _grace_s
