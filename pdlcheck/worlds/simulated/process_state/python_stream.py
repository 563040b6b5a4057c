"""The random stream of Python's module ``random``, as a piece of per-rank state."""

from __future__ import annotations

import random
from typing import Any

from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState
from pdlcheck.worlds.simulated.process_state.streams import python_stream, set_python_stream

__all__ = ["PythonStream"]


class PythonStream(RunState):
    """The state of ``random``. Runs start from the seed, or where a set-up run has ended."""

    _last: Any = None  # the state when the rank that runs got its turn

    def capture(self) -> Any:
        """Return the state of the stream."""
        self._last = state = python_stream(self._last)
        return state

    def apply(self, state: Any) -> None:
        """Set the state of the stream."""
        self._last = state
        set_python_stream(state)

    def begin(self, rank: Rank, kept: Any) -> Any:
        """Start the stream of a run."""
        if kept is None:
            random.seed(rank.seed)
        else:
            set_python_stream(kept)
        self._last = python_stream()
        return kept

    def end(self, rank: Rank, kept: Any) -> Any:
        """Return the state from which the next run starts; None: from the seed."""
        return python_stream() if rank.begins_here else kept
