"""Time that passes while no rank can go on: ranks that sleep wake, and limits of waits come.

Ranks have no clock of their own: what others do in the meantime takes no time, and whatever can happen before a rank
wakes, or a limit comes, does. So who wakes when is a matter of the program and the schedule, not of the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Elapsing"]


class _Limit(NamedTuple):
    seconds: float
    rank: int
    comes: float
    tell: Callable[[], None]


class Elapsing:
    """The sleeping ranks and the limits of one run."""

    def __init__(self) -> None:
        self._now = 0.0  # in seconds; goes on with each rank that wakes and each limit that comes
        self._wakes: dict[int, float] = {}  # by rank
        self._limits: list[_Limit] = []
        self._ends = math.inf

    @contextmanager
    def limit(self, seconds: float, rank: int, tell: Callable[[], None]) -> Iterator[None]:
        """While the block runs, ``tell`` is called once ``seconds`` have passed."""
        entry = _Limit(seconds, rank, self._now + seconds, tell)
        self._limits.append(entry)
        try:
            yield
        finally:
            if entry in self._limits:
                self._limits.remove(entry)

    @contextmanager
    def sleep(self, seconds: float, rank: int) -> Iterator[Callable[[], bool]]:
        """The rank sleeps, until what it is given says that it is awake."""
        self._wakes[rank] = self._now + seconds
        try:
            yield lambda: rank not in self._wakes
        finally:
            self._wakes.pop(rank, None)

    def wake(self) -> bool:
        """Wake the ranks whose time comes first, unless a limit or the end comes before it; True if there are any."""
        if not self._wakes:
            return False
        first = min(self._wakes.values())
        if first > self._ends or any(limit.comes < first for limit in self._limits):
            return False
        self._now = max(self._now, first)
        self._wakes = {rank: time for rank, time in self._wakes.items() if time > first}
        return True

    def end_within(self, seconds: float) -> None:
        """Nobody wakes later than that: the run has failed, and what a rank waits for may never come."""
        self._ends = min(self._ends, self._now + seconds)

    def elapse(self) -> bool:
        """Let a limit come, of several the shortest; False if there is none."""
        if not self._limits:
            return False
        shortest = min(self._limits, key=lambda limit: limit[:2])
        self._limits.remove(shortest)
        self._now = max(self._now, shortest.comes)
        shortest.tell()
        return True
