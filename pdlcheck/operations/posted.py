"""The operations that a rank posts, for code on the rank that asks for them, such as a check that looks for a cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from pdlcheck.operations.signature import Signature

__all__ = ["record_posted", "tell"]

_lists: defaultdict[int, list[list[Signature]]] = defaultdict(list)  # by rank, because simulated ranks are threads


@contextmanager
def record_posted(rank: int) -> Iterator[list[Signature]]:
    """Record the signatures of the operations that a rank posts during the block, on groups that pdlcheck watches.

    Args:
        rank: the global rank.
    """
    mine: list[Signature] = []
    _lists[rank].append(mine)
    try:
        yield mine
    finally:
        _lists[rank] = [one for one in _lists[rank] if one is not mine]  # equal lists are others' own
        if not _lists[rank]:
            del _lists[rank]


def tell(signature: Signature) -> None:
    """Record a signature for those who asked."""
    if _lists and signature.rank in _lists:
        for each in _lists[signature.rank]:
            each.append(signature)
