"""Threads that share work: compiled loops and numpy on large arrays, both without the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from pdlcheck.cores import usable_cores

__all__ = ["ENOUGH", "Team", "ranges"]

ENOUGH = 1 << 16  # numbers that justify one more thread
AT_A_TIME = 1 << 16  # numbers; numpy's calls are then long enough that threads seldom wait for the interpreter

T = TypeVar("T")


class Team:
    """A team of at most ``torch.get_num_threads()`` threads, one per core, including the calling thread.

    The end of the ``with`` block ends the other threads.

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
        self.size = max(1, min(most, torch.get_num_threads(), usable_cores()))
        self._others = ThreadPoolExecutor(self.size - 1) if self.size > 1 else None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        if self._others is not None:
            self._others.shutdown()

    def run(self, function: Callable[[int], object], give_up: Callable[[], None] = lambda: None) -> None:
        """Call ``function(0)`` to ``function(size - 1)``, all at the same time; raise the error of a failed call.

        ``give_up`` is called as soon as a call raises or cannot start, so that no other call waits for it.
        """

        def run_one(member: int) -> None:
            try:
                function(member)
            except BaseException:
                give_up()
                raise

        calls: list[Future[None]] = []
        try:
            if self._others is not None:
                for member in range(1, self.size):
                    calls.append(self._others.submit(run_one, member))
            function(0)
        except BaseException:
            give_up()
            raise
        finally:
            for call in calls:
                call.result()

    def map(self, function: Callable[[slice], T], length: int) -> list[T]:
        """Return the results of ``function`` for slices that cover ``range(length)``, in order.

        The slices depend on ``length`` only, not on the number of threads.
        """
        pieces = [slice(*piece) for piece in ranges(length, -(-length // AT_A_TIME))]
        size = self.size if length >= ENOUGH else 1
        found: list[T | None] = [None] * len(pieces)

        def work(member: int) -> None:
            for number in range(member, len(pieces), size):
                found[number] = function(pieces[number])

        if size > 1:
            self.run(work)
        else:
            work(0)
        return found  # type: ignore[return-value]  # every piece has its result


def ranges(length: int, count: int) -> list[tuple[int, int]]:
    """Return ``count`` ranges of about equal length that cover ``range(length)``."""
    return [(length * k // count, length * (k + 1) // count) for k in range(count)]
