"""The time that a process has had for itself, by which it is judged whether a process will ever answer.

On a loaded machine a process that is well may do nothing for seconds, as others have the cores. Seconds of the wall
would then decide how much of a failure is shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["OwnTime", "waited_for_cores"]

_UNKNOWN = 8  # where the system does not tell how long a process waits for a core, a second counts as an eighth of one


def waited_for_cores(pid: int) -> float | None:
    """Return for how many seconds the threads of a process have waited for a core so far.

    None if the system does not tell: it is not Linux, or the process has gone.
    """
    total = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb", buffering=0) as file:
                total += int(file.read(128).split()[1])  # after the nanoseconds on a core
    except (OSError, IndexError, ValueError):  # a thread that has ended meanwhile, too
        return None
    return total / 1e9


class OwnTime:
    """A clock of one process: it stands still while a thread of the process waits for a core.

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
                self._delay += max(now - self._last, 0.0)  # a thread that ends takes its share along
            self._last = now
        return elapsed / _UNKNOWN if self._last is None else max(elapsed - self._delay, 0.0)
