"""The schedule with the fewest context switches."""

from __future__ import annotations

from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint, usual

__all__ = ["First"]


class First:
    """The schedule in which each rank runs until it has to wait; then the lowest rank that can go on runs."""

    every_step = False
    every_post = False

    def begin(self, world_size: int) -> None:
        """Do nothing, because the schedule has no state."""

    def choose(self, point: SwitchPoint) -> int:
        """Return the usual choice."""
        return usual(point)

    def __str__(self) -> str:
        return "first"
