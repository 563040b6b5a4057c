"""What a schedule is: at each switch point, the choice of the rank that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

__all__ = ["Schedule", "SwitchPoint", "usual"]


class SwitchPoint(NamedTuple):
    """The moment at which a rank gives up its turn.

    Args:
        kind: why: ``begin`` (nobody has run yet), ``post`` (it is about to post another operation), ``wait`` (it cannot
            go on), ``poll`` (it asks whether something has happened), ``end`` (it has returned or raised).
        current: the rank that gives up its turn; -1 at ``begin``.
        runnable: the ranks that can go on, in rank order; never empty.
        pending: for every rank, what it does first when it goes on: the operation, the store access or the question;
            None if that concerns no other rank. The scheduler's own list: read it, keep no reference.
    """

    kind: str
    current: int
    runnable: tuple[int, ...]
    pending: Sequence[Any]


class Schedule(Protocol):
    """Chooses; the same object begins anew for each run."""

    @property
    def every_step(self) -> bool:
        """True if it is to be asked also where only one rank can go on."""

    @property
    def every_post(self) -> bool:
        """True if it is to be asked before each operation, also the first of a turn, which changes nothing."""

    def begin(self, world_size: int) -> None:
        """A run starts."""

    def choose(self, point: SwitchPoint) -> int:
        """Return one of ``point.runnable``."""

    def __str__(self) -> str:
        """What ``--schedule`` takes to get this schedule again."""


def usual(point: SwitchPoint) -> int:
    """The choice without a context switch: the current rank goes on while it can, then the lowest one.

    A rank that polls lets the next one go on, in a circle: what it asks about may need all of the others.
    """
    current, runnable = point.current, point.runnable
    if point.kind == "poll":
        return next((rank for rank in runnable if rank > current), runnable[0])
    return current if current in runnable else runnable[0]
