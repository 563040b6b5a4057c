"""Work shared among threads: compiled loops, and numpy on large arrays, run without the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["ENOUGH", "Team", "ranges"]

ENOUGH = 1 << 16  # numbers that are worth a thread


class Team:
    """``torch.get_num_threads()`` threads at most, the calling one among them; ``with`` ends the others.

    Example:
        >>> done = [0] * 10
        >>> def mark(member: int) -> None:
        ...     first, last = ranges(10, team.size)[member]
        ...     done[first:last] = [1] * (last - first)
        >>> with Team(3) as team:
        ...     team.run(mark)
        >>> sum(done)
        10
    """

    def __init__(self, most: int) -> None:
        self.size = max(1, min(most, torch.get_num_threads()))
        self._others = ThreadPoolExecutor(self.size - 1) if self.size > 1 else None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        if self._others is not None:
            self._others.shutdown()

    def run(self, function: Callable[[int], object]) -> None:
        """Call ``function`` with 0, 1, ... up to ``size``, exclusive, all at the same time; raise what one raises."""
        calls = [] if self._others is None else [self._others.submit(function, k) for k in range(1, self.size)]
        try:
            function(0)
        finally:
            for call in calls:
                call.result()


def ranges(length: int, count: int) -> list[tuple[int, int]]:
    """``count`` ranges of about equal length that cover ``range(length)``."""
    return [(length * k // count, length * (k + 1) // count) for k in range(count)]
