"""The notes of all ranks, merged: a note that every rank made appears once, any other one with its rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdlcheck.worlds.outcome import without_addresses

__all__ = ["agreed", "words_of"]


def agreed(noted: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield each note with a label: empty if every rank made the same note, and otherwise the number of the rank.

    Args:
        noted: the notes, by rank.
    """
    by_all = set.intersection(*(set(map(words_of, values)) for values in noted))
    for rank, values in enumerate(noted):
        for value in values:
            if words_of(value) not in by_all:
                yield f" [rank {rank}]", value
            elif rank == 0:
                yield "", value


def words_of(noted: Any) -> str:
    """Return a text that is the same for the notes of equal objects on two ranks."""
    return without_addresses(repr(noted))
