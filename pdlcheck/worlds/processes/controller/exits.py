"""The end of a process, in words."""

from __future__ import annotations

import signal

__all__ = ["FORKER", "how_it_ended"]

FORKER = "the process that had forked it"  # the fork server, a template, or a launched agent


def how_it_ended(exitcode: int) -> str:
    """Return in words how a process ended; ``exitcode`` is minus the signal if a signal ended it."""
    if exitcode < 0:
        return f"was killed by {_signal_name(-exitcode)}"
    return f"ended its process with exit code {exitcode}"


def _signal_name(signo: int) -> str:
    try:
        return signal.Signals(signo).name
    except ValueError:  # a real-time signal has no name
        return f"signal {signo}"
