"""What all ranks noted is told once, the rest with its rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pdlcheck.worlds.outcome import without_addresses

__all__ = ["agreed", "words_of"]


def agreed(noted: Sequence[Sequence[Any]]) -> Iterator[tuple[str, Any]]:
    """What each rank noted: the words that name the rank, none where every rank noted the same, and the value."""
    by_all = set.intersection(*(set(map(words_of, values)) for values in noted))
    for rank, values in enumerate(noted):
        for value in values:
            if words_of(value) not in by_all:
                yield f" [rank {rank}]", value
            elif rank == 0:
                yield "", value


def words_of(noted: Any) -> str:
    """The same for what equal objects of two ranks noted."""
    return without_addresses(repr(noted))
