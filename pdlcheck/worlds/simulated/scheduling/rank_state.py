"""The per-rank state, as the scheduler knows it: it is put in force with each turn, and saved at its end."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

__all__ = ["Isolation", "Own", "RankState"]


class Own(Protocol):
    """Additional state that is in force while one rank runs."""

    def leave(self) -> None:
        """Take the state back, because the rank gives up its turn or has ended."""

    def arrive(self) -> None:
        """Put the state in force again, because the rank goes on or starts anew."""


class RankState(Protocol):
    """What Python and torch keep for the whole process, of one rank.

    Attributes:
        begins_here: whether later runs start from the random numbers and the dtype that this run ends with.
        context: the context of the rank's code.
        leaves_streams: whether all ranks get its text streams at the end of this run.
        own: additional state, added while the rank runs.
        signal_handlers: the handlers that the rank has set, by signal number.
    """

    begins_here: bool
    context: contextvars.Context
    leaves_streams: bool
    own: list[Own]
    signal_handlers: dict[int, Any]

    def enter(self) -> None:
        """Put the rank's state in force at the start of a run."""

    def save(self) -> None:
        """Save the rank's state, because the rank gives up its turn."""

    def restore(self) -> None:
        """Put the rank's state in force again, because the rank has the turn."""

    def leave(self) -> None:
        """Save what the rank keeps for its next run, because the rank has ended."""

    def take_back(self) -> None:
        """Undo the changes of a rank that was given up in its turn."""

    def give_to_controller(self) -> None:
        """Make the changes of this rank the controller's, and so every rank's."""


class Isolation(NamedTuple):
    """The functions by which a scheduler keeps the state of its ranks apart.

    Args:
        state_of: makes the state of a rank, from (rank, world_size, seed).
        controller: returns a context manager that restores the controller's state after a run.
        prepare: called once, in the controller, before the rank threads start.
    """

    state_of: Callable[[int, int, int], RankState]
    controller: Callable[[], AbstractContextManager[None]]
    prepare: Callable[[], None]
