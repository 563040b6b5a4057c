"""The count of a run's traffic."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.worlds.observe import Traffic
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["TrafficCount"]


class TrafficCount(Observer):
    """The count of one run.

    Attributes:
        traffic: the bytes and messages so far.
    """

    def __init__(self, world_size: int) -> None:
        self.traffic = Traffic(world_size)

    def matched(self, works: Sequence[SimulatedWork]) -> None:
        """Count matched operations."""
        self.traffic.count([work.operation for work in works])
