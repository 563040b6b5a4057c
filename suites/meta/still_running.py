"""Processes that have not ended. A pid may be reused; the start time distinguishes two processes with one pid."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["is_running", "start_of", "state_of", "still_running"]


def state_of(pid: int) -> str:
    """Return the state letter of a process in /proc; X if there is no such process."""
    return _stat(pid)[0]


def start_of(pid: int) -> str:
    """Return the start of the process in ticks since the system's start; empty if there is no such process."""
    return _stat(pid)[1]


def is_running(pid: int) -> bool:
    """Return whether the process has not ended; a stopped process has not."""
    return state_of(pid) not in "ZX"


def still_running(pids: Iterable[int] | Mapping[int, str], within_s: float = 20) -> list[int]:
    """Wait for the end of processes; return those that have not ended within a time.

    Args:
        pids: the processes, or a mapping from pid to start time, which excludes a later process with the same pid.
        within_s: how long to wait.
    """
    until = time.monotonic() + within_s
    starts = pids if isinstance(pids, Mapping) else {pid: start_of(pid) for pid in pids}
    running = list(starts)
    while (running := [pid for pid in running if _is_that(pid, starts[pid])]) and time.monotonic() < until:
        time.sleep(0.01)
    return running


def _is_that(pid: int, start: str) -> bool:
    state, since = _stat(pid)
    return state not in "ZX" and since == start


def _stat(pid: int) -> tuple[str, str]:
    try:
        if f"\nTgid:\t{pid}\n" not in Path(f"/proc/{pid}/status").read_text():
            return "X", ""  # the number belongs to a thread
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    return fields[0], fields[19]
