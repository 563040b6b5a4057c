"""The module globals of the user's code, while a run is diagnosed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["OBSERVED", "ObservedGlobals", "Observer"]

_CONTROLLER = -1


class Observer(Protocol):
    """An observer of the ranks' turns; see :mod:`pdlcheck.worlds.simulated.module_globals.run`."""

    def arrive(self, rank: int) -> None:
        """Observe that ``rank`` has the turn now; -1 is the controller."""

    def call(self, fn: Callable[..., Any]) -> None:
        """Observe that the controller is about to call ``fn`` on the ranks."""


class ObservedGlobals(RunState):
    """The turns of ranks, which an observer uses to exchange module globals. Its state is the rank that has the turn.

    ``observer`` is set while a run is diagnosed.
    """

    observer: Observer | None = None
    _rank = _CONTROLLER

    def capture(self) -> int:
        """Return the rank."""
        return self._rank

    def apply(self, state: int) -> None:
        """Report to the observer that the rank has the turn."""
        self._rank = state
        if self.observer is not None:
            self.observer.arrive(state)

    def begin(self, rank: Rank, kept: Any) -> Any:
        """Report to the observer that the rank has the turn for the first time."""
        self.apply(rank.rank)
        return kept

    def baseline(self) -> Callable[[], object] | None:
        """Return the function that reports the end of the run."""
        self._rank = _CONTROLLER
        return super().baseline()


OBSERVED = ObservedGlobals()
