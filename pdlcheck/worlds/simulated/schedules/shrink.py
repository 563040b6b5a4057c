"""Reduce a failing schedule to few switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["shrink"]

Switches = Mapping[int, int]


def shrink(switches: Switches, fails: Callable[[Switches], Switches | None], *, attempts: int = 300) -> dict[int, int]:
    """Leave switches out, in blocks and then one by one, as long as the run still fails.

    The result is 1-minimal if the attempts suffice: without any single one of its switches the run no longer fails so.

    Args:
        switches: choice -> rank of a schedule that fails.
        fails: runs a schedule of these switches; returns those that it made if it failed in the same way, else None.
        attempts: runs at most.

    Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28 (2002).
    """
    best = dict(switches)
    size = len(best)
    while size >= 1 and attempts > 0:
        shorter = None
        items = sorted(best.items())
        for start in reversed(range(0, len(items), size)):  # the last first: what came before stays as it was
            if attempts == 0:
                break
            attempts -= 1
            made = fails(dict(items[:start] + items[start + size :]))
            if made is not None and len(made) < len(best):
                shorter = dict(made)
                break
        if shorter is None:
            size //= 2
        else:
            best = shorter
            size = min(size, len(best))
    return best
