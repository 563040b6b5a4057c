"""The random stream of Python's module ``random``, as a piece of per-rank state."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState
from pdlcheck.worlds.simulated.process_state.streams import python_stream, set_python_stream

__all__ = ["PythonStream"]


@lru_cache(maxsize=256)  # seeding takes longer than a small run
def _seeded(seed: int) -> Any:
    random.seed(seed)
    return python_stream()


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
        set_python_stream(_seeded(rank.seed) if kept is None else kept)
        self._last = python_stream()
        return kept

    def end(self, rank: Rank, kept: Any) -> Any:
        """Return the state from which the next run starts; None: from the seed."""
        return python_stream() if rank.begins_here else kept
