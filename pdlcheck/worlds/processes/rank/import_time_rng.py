"""The random numbers that modules draw while this rank imports them: different on each rank, as on a cluster."""

from __future__ import annotations

from contextlib import AbstractContextManager

from pdlcheck.worlds.import_streams import ImportStreams

__all__ = ["begin", "streams_of"]

_streams = ImportStreams(0, 0)


def begin(rank: int, seed: int) -> None:
    """Use the streams of this rank and seed; streams that the user's code has seeded stay while both are unchanged."""
    global _streams
    if (_streams.process, _streams.seed) != (rank, seed):
        _streams = ImportStreams(rank, seed)


def streams_of(file: str) -> AbstractContextManager[None]:
    """Return a context in which imported modules draw from the streams of ``file``; see ``import_streams.py``."""
    return _streams.of(file)
