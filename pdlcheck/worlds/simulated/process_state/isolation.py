"""The per-rank state of simulated ranks, which a process has once and each rank has for itself.

Each piece of it is a class in this folder, and ``states.py`` lists them; here are the loops over that list. Each switch
between ranks captures the state of the one and applies the state of the other. ``docs/architecture.md``, section
"Per-rank state", says what is per rank, what is not, and how a difference to processes is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pdlcheck.worlds.simulated.process_state import states
from pdlcheck.worlds.simulated.process_state.protocol import Rank
from pdlcheck.worlds.simulated.scheduling.rank_state import Own

__all__ = ["PerRankState", "isolated_controller"]


class PerRankState(Rank):
    """The per-rank state of one rank while another rank runs."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        super().__init__(rank, world_size, seed)
        self.own: list[Own] = []  # added while the rank runs
        self.signal_handlers: dict[int, Any] = {}  # by signal number
        self._pieces = states.STATES.pieces
        self._captures = states.STATES.captures
        self._applies = states.STATES.applies
        self._captured: list[Any] = []  # in the order of the captures
        self._kept: list[Any] = [None] * len(self._pieces)  # what each piece keeps from run to run
        self._is_here = False  # whether the process has this rank's state now

    def enter(self) -> None:
        """Put the rank's state in force at the start of a run."""
        self._is_here = True
        self._kept = [piece.begin(self, kept) for piece, kept in zip(self._pieces, self._kept, strict=True)]
        for own in self.own:
            own.arrive()

    def save(self) -> None:
        """Save the rank's state, because the rank gives up its turn."""
        for own in reversed(self.own):
            own.leave()
        self._captured = [capture() for capture in self._captures]
        self._is_here = False

    def restore(self) -> None:
        """Put the saved state in force, because the rank has its turn again."""
        self._is_here = True
        for apply, state in zip(self._applies, reversed(self._captured), strict=True):
            apply(state)
        for own in self.own:
            own.arrive()

    def leave(self) -> None:
        """Save what the rank keeps for its next run, because the rank has ended."""
        for own in reversed(self.own):
            own.leave()
        both = zip(reversed(self._pieces), reversed(self._kept), strict=True)
        self._kept = [piece.end(self, kept) for piece, kept in both]
        self._kept.reverse()
        self._is_here = False

    def take_back(self) -> None:
        """Undo the changes of a rank that was given up in its turn. Called in the controller."""
        if self._is_here:
            self._is_here = False
            for undo in (
                *(own.leave for own in reversed(self.own)),
                *(one.take_back for one in reversed(self._pieces)),
            ):
                with suppress(Exception):  # the rank may have been interrupted while it undid this itself
                    undo()

    def give_to_controller(self) -> None:
        """Make the changes of this rank the controller's, and so every rank's. Called in the controller after a run."""
        self._kept = [piece.give(self, kept) for piece, kept in zip(self._pieces, self._kept, strict=True)]


@contextmanager
def isolated_controller() -> Iterator[None]:
    """Restore, after the block, the controller's state that ranks change."""
    restores = [piece.baseline() for piece in states.STATES.pieces]
    try:
        yield
    finally:
        for restore in reversed(restores):
            if restore is not None:
                restore()
