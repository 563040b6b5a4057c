"""Settings that ranks must have alike, as bits in the tail of a message that is sent anyway.

The sum of a bit is 0, or the number of ranks, where all have the same, exactly in any dtype; else it is between, which
every rank sees, so that all raise or none does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["are_alike", "marks_of"]


def marks_of(problem: Exception | None, *settings: object) -> tuple[float, ...]:
    """First whether this rank has a problem; then what its settings are known by, whose texts are compared.

    Args:
        problem: what is wrong on this rank.
        settings: the same number on every rank.
    """
    return (0.0, *_bits(repr(settings))) if problem is None else (1.0, *[0.0] * 32)


@lru_cache(maxsize=64)
def _bits(text: str) -> tuple[float, ...]:
    code = zlib.crc32(text.encode())
    return tuple(float(code >> place & 1) for place in range(32))


def are_alike(marks: Sequence[float], sums: Sequence[float], world_size: int) -> bool:
    """Whether no rank has a problem, and all have the same settings."""
    return not sums[0] and all(total == world_size * mark for mark, total in zip(marks, sums, strict=True))
