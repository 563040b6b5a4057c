"""The protocol of schedules: a schedule chooses the rank that goes on at each switch point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Schedule", "SwitchPoint", "usual"]


class SwitchPoint(NamedTuple):
    """A moment at which a rank gives up its turn.

    Args:
        kind: the reason: ``begin`` (no rank has run yet), ``post`` (the rank is about to post another operation),
            ``wait`` (it cannot go on), ``poll`` (it asks whether something has happened), ``end`` (it has returned or
            raised).
        current: the rank that gives up its turn; -1 at ``begin``.
        runnable: the ranks that can go on, in rank order; never empty.
        pending: for every rank, its first act when it goes on: an operation, a store access or a poll; None if that act
            concerns no other rank. This is the scheduler's own list: read it, and keep no reference.
    """

    kind: str
    current: int
    runnable: tuple[int, ...]
    pending: Sequence[Any]


class Schedule(Protocol):
    """The rule that chooses the next rank. One object serves several runs, and starts anew for each."""

    @property
    def every_step(self) -> bool:
        """Return whether the schedule is asked even if only one rank can go on."""

    @property
    def every_post(self) -> bool:
        """Return whether the schedule is asked before each post, even the first of a turn, which changes nothing."""

    def begin(self, world_size: int) -> None:
        """Start a run."""

    def choose(self, point: SwitchPoint) -> int:
        """Return one of ``point.runnable``."""

    def __str__(self) -> str:
        """Return the text by which ``--schedule`` selects this schedule."""


def usual(point: SwitchPoint) -> int:
    """Return the choice without a context switch: the current rank if it can go on, else the lowest one.

    After a poll, the next rank goes on, in a circle: the event that the current rank polls for may need all others.
    """
    current, runnable = point.current, point.runnable
    if point.kind == "poll":
        return next((rank for rank in runnable if rank > current), runnable[0])
    return current if current in runnable else runnable[0]
