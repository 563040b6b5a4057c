"""A schedule whose choices somebody else draws, Hypothesis above all."""

from __future__ import annotations

from collections.abc import Callable

from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint, usual
from pdlcheck.worlds.simulated.schedules.replay import Replay

__all__ = ["DrawnSchedule"]

_MAX_DRAWN = 400  # choices; Hypothesis limits what an example may draw


class DrawnSchedule:
    """Choice ``0`` is the usual one; ``k`` is the k-th of the others, so that small numbers mean few switches.

    Args:
        draw: ``draw(n)`` returns a number below n.
    """

    every_step = False

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._switches: dict[int, int] = {}
        self._choice = 0

    def begin(self, world_size: int) -> None:
        self._switches = {}
        self._choice = 0

    def choose(self, point: SwitchPoint) -> int:
        chosen = usual(point)
        if self._choice < _MAX_DRAWN:
            drawn = self._draw(len(point.runnable))
            if drawn:
                chosen = [rank for rank in point.runnable if rank != chosen][drawn - 1]
                self._switches[self._choice] = chosen
        self._choice += 1
        return chosen

    def __reduce__(self) -> tuple[type[Replay], tuple[dict[int, int]]]:
        return Replay, (self._switches,)  # for ranks: the choices of the last run

    def __str__(self) -> str:
        return str(Replay(self._switches))

    def __repr__(self) -> str:
        return repr(Replay(self._switches))
