"""The time that passes while no rank can go on: sleeping ranks wake, and time limits elapse.

Ranks have no clock of their own: the work of other ranks takes no time. Everything that can happen before a rank wakes,
or before a limit elapses, happens before it. The order therefore depends on the program and the schedule, and not on
the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Timers"]


class _Limit(NamedTuple):
    seconds: float
    rank: int
    comes: float
    tell: Callable[[], None]


class Timers:
    """The sleeping ranks and the time limits of one run."""

    def __init__(self) -> None:
        self._now = 0.0  # in seconds; advances when a rank wakes and when a limit elapses
        self._wakes: dict[int, float] = {}  # by rank
        self._limits: list[_Limit] = []
        self._ends = math.inf

    @contextmanager
    def limit(self, seconds: float, rank: int, tell: Callable[[], None]) -> Iterator[None]:
        """Call ``tell`` if ``seconds`` pass before the block ends."""
        entry = _Limit(seconds, rank, self._now + seconds, tell)
        self._limits.append(entry)
        try:
            yield
        finally:
            if entry in self._limits:
                self._limits.remove(entry)

    @contextmanager
    def sleep(self, seconds: float, rank: int) -> Iterator[Callable[[], bool]]:
        """Put the rank to sleep in the block, and yield a function that returns whether it is awake."""
        self._wakes[rank] = self._now + seconds
        try:
            yield lambda: rank not in self._wakes
        finally:
            self._wakes.pop(rank, None)

    def wake_sleepers(self) -> bool:
        """Wake the ranks whose time comes first, unless a limit or the end comes before it.

        Returns:
            True if a rank was woken.
        """
        if not self._wakes:
            return False
        first = min(self._wakes.values())
        if first > self._ends or any(limit.comes < first for limit in self._limits):
            return False
        self._now = max(self._now, first)
        self._wakes = {rank: time for rank, time in self._wakes.items() if time > first}
        return True

    def cap(self, seconds: float) -> None:
        """Let no rank wake later than ``seconds`` from now.

        The run has failed, and the event that a rank waits for may never come.
        """
        self._ends = min(self._ends, self._now + seconds)

    def fire_next(self) -> bool:
        """Let the shortest limit elapse; return False if there is none."""
        if not self._limits:
            return False
        shortest = min(self._limits, key=lambda limit: limit[:2])
        self._limits.remove(shortest)
        self._now = max(self._now, shortest.comes)
        shortest.tell()
        return True
