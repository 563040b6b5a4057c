"""A schedule whose choices are drawn from outside, above all by Hypothesis."""

from __future__ import annotations

from collections.abc import Callable

from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint, usual
from pdlcheck.worlds.simulated.schedules.replay import Replay

__all__ = ["DrawnSchedule"]

_MAX_CHOICE = 1000  # nothing is drawn beyond it, because Hypothesis limits what an example may draw
_MAX_GAP = 16


class DrawnSchedule:
    """A schedule of the usual choices with drawn switches between them. Fewer and smaller numbers give fewer switches.

    If the first number is 0, there are no more switches. If it is ``k``, ``k - 1`` usual choices follow, and then a
    switch to another rank. The second number selects that rank.

    Args:
        draw: ``draw(n)`` returns a number below n.
    """

    every_step = False
    every_post = False

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self.begin(0)

    def begin(self, world_size: int) -> None:
        """Start a run, without any switch so far."""
        self._switches: dict[int, int] = {}
        self._choice = 0
        self._next = 0  # the next choice at which a number is drawn, or a switch is made
        self._switch = False

    def choose(self, point: SwitchPoint) -> int:
        """Return the usual choice, or a drawn rank where there is a switch."""
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
        return Replay, (self._switches,)  # ranks receive the choices of the last run

    def __str__(self) -> str:
        return str(Replay(self._switches))

    def __repr__(self) -> str:
        return repr(Replay(self._switches))
