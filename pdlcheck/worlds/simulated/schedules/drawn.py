"""A schedule whose choices somebody else draws, Hypothesis above all."""

from __future__ import annotations

from collections.abc import Callable

from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint, usual
from pdlcheck.worlds.simulated.schedules.replay import Replay

__all__ = ["DrawnSchedule"]

_MAX_CHOICE = 1000  # beyond it nothing is drawn: Hypothesis limits what an example may draw
_MAX_GAP = 16


class DrawnSchedule:
    """The usual choices, with switches between: the fewer numbers are drawn, and the smaller, the fewer switches.

    The first number is 0: no more switches; or ``k``: ``k - 1`` usual choices and then a switch to another rank, which
    the second number names.

    Args:
        draw: ``draw(n)`` returns a number below n.
    """

    every_step = False
    every_post = False

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self.begin(0)

    def begin(self, world_size: int) -> None:
        self._switches: dict[int, int] = {}
        self._choice = 0
        self._next = 0  # the choice at which something is drawn, or a switch made
        self._switch = False

    def choose(self, point: SwitchPoint) -> int:
        choice, chosen = self._choice, usual(point)
        self._choice += 1
        while choice == self._next and not self._switch and choice < _MAX_CHOICE:
            gap = self._draw(_MAX_GAP + 2)
            if gap == 0:
                self._next = -1
            else:
                self._switch = gap <= _MAX_GAP
                self._next += gap - 1
        if choice == self._next and self._switch:
            others = [rank for rank in point.runnable if rank != chosen]
            chosen = self._switches[choice] = others[self._draw(len(others))]
            self._switch = False
            self._next += 1
        return chosen

    def __reduce__(self) -> tuple[type[Replay], tuple[dict[int, int]]]:
        return Replay, (self._switches,)  # for ranks: the choices of the last run

    def __str__(self) -> str:
        return str(Replay(self._switches))

    def __repr__(self) -> str:
        return repr(Replay(self._switches))
