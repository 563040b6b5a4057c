"""The operations that a rank posts, for code on the rank that asks for them, such as a check that looks for a cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pdlcheck.operations.signature import Signature

__all__ = ["Taker", "record_posted", "take_posted", "tell"]


class Taker(Protocol):
    """What takes signatures: a list, or an object that counts them."""

    def append(self, signature: Signature, /) -> Any:
        """Take the signature of an operation that the rank posts."""


_takers: defaultdict[int, list[Taker]] = defaultdict(list)  # by rank, because simulated ranks are threads


@contextmanager
def record_posted(rank: int) -> Iterator[list[Signature]]:
    """Record the signatures of the operations that a rank posts during the block, on groups that pdlcheck watches.

    Args:
        rank: the global rank.
    """
    mine: list[Signature] = []
    with take_posted(rank, mine):
        yield mine


@contextmanager
def take_posted(rank: int, taker: Taker) -> Iterator[None]:
    """Give ``taker`` the signatures that :func:`record_posted` records."""
    _takers[rank].append(taker)
    try:
        yield
    finally:
        _takers[rank] = [one for one in _takers[rank] if one is not taker]  # equal lists are others' own
        if not _takers[rank]:
            del _takers[rank]


def tell(signature: Signature) -> None:
    """Record a signature for those who asked."""
    if _takers and signature.rank in _takers:
        for each in _takers[signature.rank]:
            each.append(signature)
