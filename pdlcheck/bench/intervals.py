"""Confidence intervals of medians by the bootstrap.

On a shared machine, consecutive rounds resemble each other. So the bootstrap draws whole blocks of rounds instead of
single rounds, which would give intervals that are too narrow.

Source: Künsch, "The jackknife and the bootstrap for general stationary observations", Ann. Statist. 17 (1989).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["CONFIDENCE", "Interval", "median_interval", "paired_ratio", "unpaired_ratio"]

CONFIDENCE = 0.95
_RESAMPLES = 2000


class Interval(NamedTuple):
    """An estimate and the interval that contains the true value with a probability of 95 %."""

    value: float
    low: float
    high: float


def median_interval(seconds: Sequence[float]) -> Interval:
    """Return the median over rounds, with its interval.

    Example:
        >>> median_interval([2.0, 2.0, 2.0])
        Interval(value=2.0, low=2.0, high=2.0)
    """
    times = _numbers(seconds)
    return _interval(float(np.median(times)), np.median(times[_blocks(len(times), seed=0)], axis=1))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the ratio of the medians of two functions that took turns; both use the same drawn rounds.

    Example:
        >>> paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
        Interval(value=2.0, low=2.0, high=2.0)

    Raises:
        ValueError: the numbers of rounds differ, or there are no rounds.
    """
    above, below = _numbers(ours), _numbers(theirs)
    if len(above) != len(below):
        raise ValueError(f"paired_ratio needs as many rounds of both, got {len(above)} and {len(below)}")
    drawn = _blocks(len(above), seed=0)
    ratios = np.median(above[drawn], axis=1) / np.median(below[drawn], axis=1)
    return _interval(float(np.median(above) / np.median(below)), ratios)


def unpaired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Return the ratio of the medians of two functions that were measured separately.

    Example:
        >>> unpaired_ratio([3.0, 3.0], [2.0, 2.0, 2.0])
        Interval(value=1.5, low=1.5, high=1.5)
    """
    above, below = _numbers(ours), _numbers(theirs)
    ratios = np.median(above[_blocks(len(above), seed=0)], axis=1) / np.median(
        below[_blocks(len(below), seed=1)], axis=1
    )
    return _interval(float(np.median(above) / np.median(below)), ratios)


def _numbers(seconds: Sequence[float]) -> NDArray[np.float64]:
    if not len(seconds):
        raise ValueError("an interval needs the seconds of at least one round, got none")
    return np.asarray(seconds, dtype=np.float64)


def _blocks(number: int, seed: int) -> NDArray[np.int64]:
    """Return the positions of ``number`` rounds for each resample: blocks of consecutive rounds that wrap around."""
    length = max(round(number ** (1 / 3)), 1)
    starts = np.random.default_rng(seed).integers(number, size=(_RESAMPLES, -(-number // length), 1))
    return ((starts + np.arange(length)) % number).reshape(_RESAMPLES, -1)[:, :number]


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(value, float(low), float(high))
