"""The schedule that makes every choice at random."""

from __future__ import annotations

import random

from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint

__all__ = ["Random"]


class Random:
    """A schedule that chooses any rank that can go on, with equal probability, from ``seed``.

    A run with ``c`` choices among at most ``n`` ranks takes one given path with a probability of at least ``n ** -c``.
    The schedule is good at finding bugs that many schedules show. It is poor at finding an order of a few operations
    that are far apart; see :class:`PCT`.
    """

    every_step = False
    every_post = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = random.Random(seed)

    def begin(self, world_size: int) -> None:
        """Start a run with the same random numbers."""
        self._random = random.Random(self.seed)

    def choose(self, point: SwitchPoint) -> int:
        """Return a random rank that can go on."""
        return self._random.choice(point.runnable)

    def __str__(self) -> str:
        return f"random:{self.seed}"
