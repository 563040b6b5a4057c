"""Marks: bits in the tail of a message that is sent anyway, to compare settings between ranks.

If all ranks have the same bit, its sum is 0 or the number of ranks, exactly in any dtype. Otherwise the sum is in
between. Every rank sees the same sums, so all ranks raise or none does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["all_equal", "marks_of"]


def marks_of(problem: Exception | None, *settings: object) -> tuple[float, ...]:
    """Return the marks: first whether this rank has a problem, then a checksum of its settings as bits.

    Args:
        problem: the error of this rank, or ``None``.
        settings: the values to compare, by their ``repr``; the same number on every rank.
    """
    return (0.0, *_bits(repr(settings))) if problem is None else (1.0, *[0.0] * 32)


@lru_cache(maxsize=64)
def _bits(text: str) -> tuple[float, ...]:
    code = zlib.crc32(text.encode())
    return tuple(float(code >> place & 1) for place in range(32))


def all_equal(marks: Sequence[float], sums: Sequence[float], world_size: int) -> bool:
    """Return whether no rank has a problem and all ranks have the same settings."""
    return not sums[0] and all(total == world_size * mark for mark, total in zip(marks, sums, strict=True))
