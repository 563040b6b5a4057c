"""The time that a process has had for itself, by which it is judged whether a process will ever answer.

On a loaded machine a process that is well may do nothing for seconds, as others have the cores. Seconds of the wall
would then decide how much of a failure is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["OwnTime", "waited_for_cores"]

_UNKNOWN = 8  # where the system does not tell how long a process waits for a core, a second counts as an eighth of one
_AT_MOST_LATE = 32  # a process that gets less of a core than that is not waited for


def waited_for_cores(pid: int) -> float | None:
    """Return for how many seconds the main thread of a process has waited for a core so far.

    It is the one that ends a call. Those of all threads together may be more than the seconds that have passed.
    None if the system does not tell: it is not Linux, or the process has gone.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) / 1e9  # after the nanoseconds on a core
    except (OSError, IndexError, ValueError):
        return None


class OwnTime:
    """A clock of one process: it stands still while the main thread waits for a core, or nearly so.

    Args:
        waited: see :func:`waited_for_cores`.
    """

    def __init__(self, waited: Callable[[], float | None]) -> None:
        self._waited = waited
        self._last = waited()
        self._delay = 0.0
        self._began = time.monotonic()

    def spent(self) -> float:
        """The seconds of the process since this clock was made."""
        now = self._waited()
        elapsed = time.monotonic() - self._began
        if now is not None:
            if self._last is not None:
                self._delay += max(now - self._last, 0.0)
            self._last = now
        return elapsed / _UNKNOWN if self._last is None else max(elapsed - self._delay, elapsed / _AT_MOST_LATE)
