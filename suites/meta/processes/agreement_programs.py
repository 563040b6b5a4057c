"""The programs of modelled ranks, and the tables that a model interprets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdlcheck.worlds.processes.exchange.agreement import (
    ON_CONTROLLER,
    ON_RANK,
    Event,
    Notice,
    Ruling,
    Stage,
    State,
    Step,
)

__all__ = ["Broken", "Do", "Program", "Tables"]


class Broken(AssertionError):
    """The error for a run that breaks an invariant."""


class Tables(NamedTuple):
    """The tables that a model interprets."""

    rank: Mapping[tuple[State, Event], Step] = ON_RANK
    controller: Mapping[tuple[Stage, Notice], Ruling] = ON_CONTROLLER


class Do(NamedTuple):
    """One instruction of a rank.

    Args:
        what: ``sync`` posts an operation and waits for it; ``async`` posts it; ``wait`` waits for it; ``try`` waits up
            to a time limit; ``set`` and ``await`` a flag that pdlcheck does not see; ``raise`` raises an error.
        name: the operation, or the flag.
        variant: operations with different variants do not match.
    """

    what: str
    name: int = 0
    variant: int = 0


class Program(NamedTuple):
    """The instructions of each rank, and the conditions of a run.

    Args:
        ranks: the instructions of each rank.
        ways: the channel of each operation; operations of a channel go in the order in which they are posted.
        slots: the place of each operation's word on the board; with equal places, one replaces the other.
        unseen: operations that only the controller can match.
        unlogged: (rank, operation) for which the rank's log has no room.
        mortal: ranks that may die at any step.
        expected: the verdict; empty if there must be none.
        at_once: True if a rank reads the words of all others in one step, which leaves fewer states.
    """

    ranks: tuple[tuple[Do, ...], ...]
    ways: tuple[int, ...] = (0, 0, 0, 0)
    slots: tuple[int, ...] = (0, 1, 2, 3)
    unseen: frozenset[int] = frozenset()
    unlogged: frozenset[tuple[int, int]] = frozenset()
    mortal: frozenset[int] = frozenset()
    expected: str = ""
    at_once: bool = False

    def meets(self, rank: int, operation: int) -> bool:
        """Return whether an operation has a word on the board."""
        return operation not in self.unseen and (rank, operation) not in self.unlogged

    @property
    def may_fail(self) -> bool:
        """Return whether a rank may raise or die."""
        return bool(self.mortal) or any(do.what == "raise" for rank in self.ranks for do in rank)
