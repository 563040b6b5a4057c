"""The models that the benchmarks fit to measurements: links and scaling laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdlcheck.clock.links import Link

__all__ = ["LinkFit", "amdahl_s", "fit_link", "karp_flatt", "ring_link", "serial_fraction"]


class LinkFit(NamedTuple):
    """The line ``seconds = alpha_s + nbytes / beta``.

    Args:
        alpha_s: seconds of an operation without data.
        beta_GBps: bandwidth for large data.
        worst_error: the largest relative error of the line at a measured size.
    """

    alpha_s: float
    beta_GBps: float
    worst_error: float

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of an operation that the line predicts."""
        return self.alpha_s + nbytes / (self.beta_GBps * 1e9)


def fit_link(seconds: Mapping[int, float]) -> LinkFit:
    """Fit the line to the seconds of an operation by its bytes; the fit minimises relative errors.

    Args:
        seconds: seconds by bytes, for two sizes or more.

    Example:
        >>> fit_link({0: 0.001, 1_000_000_000: 1.001})
        LinkFit(alpha_s=0.001, beta_GBps=1.0, worst_error=0.0)

    Raises:
        ValueError: fewer than two sizes.

    Source: Hockney, "The communication challenge for MPP", Parallel Computing 20 (1994).
    """
    if len(seconds) < 2:
        raise ValueError(f"fit_link draws a line through two sizes or more, got {list(seconds)}")
    nbytes, times = np.array(list(seconds), dtype=float), np.array(list(seconds.values()))
    columns = np.stack([np.ones_like(nbytes), nbytes], axis=1) / times[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    alpha, per_byte = max(float(alpha), 0.0), max(float(per_byte), 1e-18)
    errors = np.abs(alpha + per_byte * nbytes - times) / times
    return LinkFit(round(alpha, 12), round(1e-9 / per_byte, 6), round(float(errors.max()), 6))


def ring_link(fit: LinkFit, world_size: int) -> Link:
    """Return the link for each message of a ring whose all_reduce takes the time that the line predicts.

    The ring sends ``2 (n - 1)`` messages of ``nbytes / n``, one after the other.

    Example:
        >>> ring_link(LinkFit(alpha_s=0.002, beta_GBps=1.0, worst_error=0.0), 2)
        Link(latency_s=0.001, bandwidth_GBps=1.0)

    Raises:
        ValueError: world_size is below 2.
    """
    if world_size < 2:
        raise ValueError(f"ring_link needs a ring of two ranks or more, got world_size={world_size}")
    messages = 2 * (world_size - 1)
    return Link(latency_s=fit.alpha_s / messages, bandwidth_GBps=fit.beta_GBps * messages / world_size)


def karp_flatt(seconds_of_one: float, seconds: float, world_size: int) -> float:
    """Return the serial fraction that follows from a speed-up on ``world_size`` ranks: ``(1/S - 1/P) / (1 - 1/P)``.

    Example:
        >>> karp_flatt(4.0, 1.0, 4)
        0.0

    Raises:
        ValueError: world_size is below 2.

    Source: Karp and Flatt, "Measuring parallel processor performance", CACM 33 (1990).
    """
    if world_size < 2:
        raise ValueError(f"karp_flatt compares two ranks or more with one, got world_size={world_size}")
    return (seconds / seconds_of_one - 1 / world_size) / (1 - 1 / world_size)


def serial_fraction(seconds: Mapping[int, float]) -> float:
    """Return the mean serial fraction of a strong scaling, computed by :func:`karp_flatt`.

    Args:
        seconds: seconds by number of ranks; one rank must be among them, and another number.

    Example:
        >>> serial_fraction({1: 4.0, 2: 2.0, 4: 1.0})
        0.0

    Raises:
        ValueError: one rank, or every other number, is missing.
    """
    if 1 not in seconds or len(seconds) < 2:
        raise ValueError(f"serial_fraction needs the seconds of one rank and of more, got ranks {sorted(seconds)}")
    found: Sequence[float] = [karp_flatt(seconds[1], seconds[size], size) for size in seconds if size > 1]
    return float(np.mean(found))


def amdahl_s(seconds_of_one: float, world_size: int, fraction: float) -> float:
    """Return the seconds on ``world_size`` ranks that Amdahl's law predicts.

    Example:
        >>> amdahl_s(4.0, 4, 0.0)
        1.0
    """
    return seconds_of_one * (fraction + (1 - fraction) / world_size)
