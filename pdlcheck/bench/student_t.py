"""Student's t distribution. This is the one file that imports SciPy for it."""

from __future__ import annotations

from typing import Any

from pdlcheck.extras import extra

__all__ = ["beyond", "quantile"]


def quantile(share: float, freedom: float) -> float:
    """Return the value below which ``share`` of the distribution lies.

    Raises:
        MissingExtra: SciPy is not installed.

    Example:
        >>> round(quantile(0.975, 2), 3)
        4.303
    """
    return float(_t().ppf(share, freedom))


def beyond(value: float, freedom: float) -> float:
    """Return the share of the distribution that lies above ``value``.

    Raises:
        MissingExtra: SciPy is not installed.
    """
    return float(_t().sf(value, freedom))


def _t() -> Any:
    with extra("bench", "an interval"):
        from scipy.stats import t
    return t
