"""The random stream of ``numpy.random``, as a piece of per-rank state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdlcheck.worlds.simulated.process_state.gauss_cache import cached_gauss, set_cached_gauss
from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["NumpyStream"]

_set_generator = getattr(np.random, "set_bit_generator")  # noqa: B009 - its type stub does not export it
_get_generator = getattr(np.random, "get_bit_generator")  # noqa: B009
_generators: list[np.random.MT19937] = []  # one for each rank: making one takes longer than a small run


def _generator_of(rank: int) -> np.random.MT19937:
    while len(_generators) <= rank:
        _generators.append(np.random.MT19937())
    return _generators[rank]


class NumpyStream(RunState):
    """The bit generator of ``numpy.random``, one for each rank, and the normal number that numpy keeps beside it.

    Runs start from the seed, or where a set-up run has ended.
    """

    _generator: Any  # of the rank that runs

    def capture(self) -> tuple[Any, Any]:
        """Return the generator and the kept number."""
        return self._generator, cached_gauss()

    def apply(self, state: tuple[Any, Any]) -> None:
        """Set the generator and the kept number."""
        self._generator, normal = state
        _set_generator(self._generator)
        set_cached_gauss(normal)

    def baseline(self) -> Callable[[], object] | None:
        """Return the function that restores the controller's generator."""
        self._generator = _get_generator()
        return super().baseline()

    def begin(self, rank: Rank, kept: Any) -> Any:
        """Start the stream of a run."""
        self._generator = _generator_of(rank.rank)
        _set_generator(self._generator)
        if kept is None:
            np.random.seed(rank.seed % 2**32)
        else:
            np.random.set_state(kept)
        return kept

    def end(self, rank: Rank, kept: Any) -> Any:
        """Return the state from which the next run starts; None: from the seed."""
        return np.random.get_state() if rank.begins_here else kept
