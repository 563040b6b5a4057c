"""Which processes have not ended."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["is_running", "state_of", "still_running"]


def state_of(pid: int) -> str:
    """The letter that /proc has for the state of a process; X where there is none any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_running(pid: int) -> bool:
    """Whether the process has not ended; one that is stopped has not."""
    return state_of(pid) not in "ZX"


def still_running(pids: Iterable[int], within_s: float = 20) -> list[int]:
    """Wait for the end of processes; return those that have not ended within a time."""
    until = time.monotonic() + within_s
    running = list(pids)
    while (running := [pid for pid in running if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.01)
    return running
