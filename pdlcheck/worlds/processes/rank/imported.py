"""The random numbers that modules draw while this rank imports them: other ones on each rank, as on a cluster."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pdlcheck.worlds.import_streams import ImportStreams

__all__ = ["begin", "streams_of"]

_streams = ImportStreams(0, 0)


def begin(rank: int, seed: int) -> None:
    """Be this rank; what the user's code has seeded stays as long as both are the same."""
    global _streams
    if (_streams.process, _streams.seed) != (rank, seed):
        _streams = ImportStreams(rank, seed)


def streams_of(file: str) -> AbstractContextManager[None]:
    """While the block runs, what is imported draws from the streams of this file; see ``import_streams.py``."""
    return _streams.of(file)
