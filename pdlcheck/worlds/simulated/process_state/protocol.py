"""The protocol of one piece of the process's state, of which each simulated rank has its own."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

__all__ = ["Kept", "ProcessState", "Rank", "RunState"]


class Rank:
    """The facts about a rank that its state depends on.

    Args:
        rank: the number of the rank.
        world_size: the number of ranks.
        seed: the seed of the world.
    """

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.seed = seed * 10_007 + rank  # ranks start with different streams
        self.context = contextvars.Context()  # the context of the rank's code
        self.leaves_streams = False  # whether all ranks get its text streams at the end of this run
        self.begins_here = False  # whether later runs start from the random numbers and the dtype this run ends with


class Kept(NamedTuple):
    """The state that a rank keeps from one run to the next.

    Args:
        start: the controller's state when the rank's last run began.
        state: the rank's state when that run ended.
    """

    start: Any
    state: Any


class ProcessState(Protocol):
    """One piece of the process's state, of which each rank has its own. One object serves all ranks.

    A piece has to define ``capture`` and ``apply``. The other methods give each rank the controller's state when its
    first run begins, and the rank's own state after that, until the controller changes its state.

    The controller calls ``baseline`` when a run begins. Each rank calls ``begin`` when its turn comes for the first
    time, ``capture`` when it gives up its turn, ``apply`` when it has its turn again, and ``end`` when it has ended.
    ``begin``, ``end`` and ``give`` take what the rank keeps from run to run, None at first, and return what it keeps
    from now on.
    """

    at_switches: ClassVar[bool] = True  # whether switches exchange it; not if threads have it, or ranks share it
    start: Any  # the controller's state, with which ranks start

    def capture(self) -> Any:
        """Return the state of the rank that gives up its turn.

        If the controller's state is seldom changed, this may put that back. Then ``apply`` has less to do.
        """

    def apply(self, state: Any) -> None:
        """Put a state that ``capture`` has returned in force."""

    def baseline(self) -> Callable[[], object] | None:
        """Record the controller's state, with which ranks start; return the function that restores it after the run."""
        self.start = self.capture()
        return partial(self.apply, self.start)

    def begin(self, rank: Rank, kept: Any) -> Any:
        """Put in force the state with which a run of the rank begins."""
        self.apply(kept.state if kept is not None and kept.start == self.start else self.start)
        return kept

    def end(self, rank: Rank, kept: Any) -> Any:
        """Return the state that the rank has at the end of a run."""
        return Kept(self.start, self.capture())

    def give(self, rank: Rank, kept: Any) -> Any:
        """Make the rank's changes the controller's, and so those of every rank. Called in the controller."""
        if kept.state != kept.start:
            self.apply(kept.state)
        return kept

    def take_back(self) -> None:
        """Undo the changes of a rank that was given up in its turn, if ``baseline`` does not restore them.

        Called in the controller.
        """
        return


class RunState(ProcessState, Protocol):
    """A piece of the process's state that ranks do not keep from run to run, and that the controller does not take."""

    def begin(self, rank: Rank, kept: Any) -> Any:
        """Leave the state as it is."""
        return kept

    def end(self, rank: Rank, kept: Any) -> Any:
        """Return what the rank has kept before."""
        return kept

    def give(self, rank: Rank, kept: Any) -> Any:
        """Leave the controller's state as it is."""
        return kept
