"""The time that a process has had for itself; it decides whether a process will ever answer.

On a loaded machine, a healthy process may do nothing for seconds because others have the cores. With wall-clock time,
the load would decide how much of a failure is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["OwnTime", "waited_for_cores"]

_UNKNOWN = 8  # if the system does not report waiting times, a second counts as an eighth of a second
_AT_MOST_LATE = 32  # a process that gets less than 1/32 of a core is not waited for


def waited_for_cores(pid: int) -> float | None:
    """Return the seconds that the main thread of a process has waited for a core so far.

    The main thread is the one that ends a call. The sum over all threads may exceed the time that has passed. The
    result is None if the system does not report it: it is not Linux, or the process has ended.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) / 1e9  # the first number is the nanoseconds on a core
    except (OSError, IndexError, ValueError):
        return None


class OwnTime:
    """A clock of one process; it stands still, or nearly so, while the main thread waits for a core.

    Args:
        waited: returns the waiting time; see :func:`waited_for_cores`.
    """

    def __init__(self, waited: Callable[[], float | None]) -> None:
        self._waited = waited
        self._last = waited()
        self._delay = 0.0
        self._began = time.monotonic()

    def spent(self) -> float:
        """Return the process's own seconds since this clock was made."""
        now = self._waited()
        elapsed = time.monotonic() - self._began
        if now is not None:
            if self._last is not None:
                self._delay += max(now - self._last, 0.0)
            self._last = now
        return elapsed / _UNKNOWN if self._last is None else max(elapsed - self._delay, elapsed / _AT_MOST_LATE)
