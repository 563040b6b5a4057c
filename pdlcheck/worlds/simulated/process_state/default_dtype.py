"""The default dtype of torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pdlcheck.worlds.simulated.process_state.protocol import ProcessState, Rank

__all__ = ["DefaultDtype"]


class _Kept(NamedTuple):
    start: torch.dtype  # the controller's when the last run began
    state: torch.dtype  # the rank's when that run ended
    first: torch.dtype | None  # the one that a set-up run has ended with


class DefaultDtype(ProcessState):
    """The default dtype.

    Runs start from the controller's. If a set-up run has ended with another one, they start from that, until the
    controller changes its own.
    """

    start: torch.dtype

    def capture(self) -> torch.dtype:
        """Return the default dtype."""
        return torch.get_default_dtype()

    def apply(self, state: torch.dtype) -> None:
        """Set the default dtype."""
        if torch.get_default_dtype() is not state:
            torch.set_default_dtype(state)

    def begin(self, rank: Rank, kept: _Kept | None) -> _Kept | None:
        """Set the default dtype with which a run starts."""
        state = self.start
        if kept is not None and kept.first is not None and kept.start is self.start:
            state = kept.first
        self.apply(state)
        return kept

    def end(self, rank: Rank, kept: _Kept | None) -> _Kept:
        """Return the default dtypes of the rank and of the controller."""
        now, first = self.capture(), None if kept is None else kept.first
        return _Kept(self.start, now, now if rank.begins_here else first)
