"""Sets of moments, as sorted intervals ``(start, end)`` that do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Interval", "common", "merged", "without"]

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union.

    Example:
        >>> merged([(3, 4), (0, 2), (1, 3), (6, 7)])
        [(0, 4), (6, 7)]
    """
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of both sets.

    Example:
        >>> common([(0, 4), (6, 9)], [(1, 2), (3, 7)])
        [(1, 2), (3, 4), (6, 7)]
    """
    both, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            both.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return both


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the moments that are in ``one`` and not in ``other``.

    Example:
        >>> without([(0, 4), (6, 9)], [(1, 2), (3, 7)])
        [(0, 1), (2, 3), (7, 9)]
    """
    if not one:
        return []
    ends = [one[0][0], *[moment for interval in other for moment in interval], one[-1][1]]
    gaps = [(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end]
    return common(one, gaps)
