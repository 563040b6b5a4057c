"""The callback that follows the solver while it runs."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RoundProgress", "unheard"]

RoundProgress = Callable[[int, float], None]
"""Called with the rounds so far and the bound on the error: 0 and infinity before the first."""


def unheard(rounds: int, bound: float) -> None:
    """Do nothing: the default callback."""
