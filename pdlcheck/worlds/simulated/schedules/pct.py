"""Probabilistic concurrency testing: random priorities, and a few points at which they change."""

from __future__ import annotations

import random

from pdlcheck.worlds.simulated.schedules.protocol import SwitchPoint

__all__ = ["PCT", "pct_bound"]


def pct_bound(world_size: int, steps: int, depth: int) -> float:
    """Return the least probability that one run of :class:`PCT` finds a bug of depth d: ``1 / (n * k ** (d - 1))``.

    Args:
        world_size: number of ranks n.
        steps: number of switch points of a run, k.
        depth: number of pairs of operations whose order the bug needs, d; 1 for most deadlocks of two ranks.

    Example:
        >>> pct_bound(4, 100, 2)
        0.0025
    """
    return float(1.0 / (world_size * steps ** (depth - 1)))


class PCT:
    """A schedule of random priorities: the runnable rank of the highest priority goes on.

    Priorities change at ``depth - 1`` steps. A run with n ranks and at most k switch points finds a bug of depth d with
    a probability of at least ``1 / (n * k ** (d - 1))``, for every program: see :func:`pct_bound`. A rank that polls
    gets the lowest priority. Otherwise it could prevent the event that it polls for. The bound holds for programs that
    do not poll.

    Args:
        seed: the seed of the priorities and of the steps at which they change.
        depth: d, at least 1.
        steps: k. Priorities do not change after that many steps.

    Source: Burckhardt, Kothari, Musuvathi and Nagarakatte, "A randomized scheduler with probabilistic guarantees of
    finding bugs", ASPLOS 2010.
    """

    every_step = True
    every_post = False

    def __init__(self, seed: int = 0, depth: int = 3, steps: int = 100) -> None:
        if depth < 1:
            raise ValueError(f"depth of a PCT schedule must be at least 1, got {depth}")
        if steps < 1:
            raise ValueError(f"steps of a PCT schedule must be at least 1, got {steps}")
        self.seed, self.depth, self.steps = seed, depth, steps

    def begin(self, world_size: int) -> None:
        """Draw the priorities, and the steps at which they change."""
        draw = random.Random(self.seed)
        # initial priorities are d, d + 1, ...; a change gives the chosen rank one of d - 1, d - 2, ..., 1
        self._priorities = draw.sample(range(self.depth, self.depth + world_size), world_size)
        self._changes = sorted(draw.choices(range(1, self.steps + 1), k=self.depth - 1), reverse=True)
        self._step = 0
        self._lowest = 0

    def choose(self, point: SwitchPoint) -> int:
        """Return the runnable rank of the highest priority."""
        self._step += 1
        priorities = self._priorities
        if point.kind == "poll":
            self._lowest -= 1
            priorities[point.current] = self._lowest
        chosen = max(point.runnable, key=priorities.__getitem__)
        while self._changes and self._changes[-1] <= self._step:
            priorities[chosen] = len(self._changes)
            self._changes.pop()
            chosen = max(point.runnable, key=priorities.__getitem__)
        return chosen

    def __str__(self) -> str:
        return f"pct:{self.seed},{self.depth},{self.steps}"
