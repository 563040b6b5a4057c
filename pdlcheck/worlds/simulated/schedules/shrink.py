"""The reduction of a failing schedule to few switches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["shrink"]

Switches = Mapping[int, int]


def shrink(switches: Switches, fails: Callable[[Switches], Switches | None], *, attempts: int = 300) -> dict[int, int]:
    """Remove switches, in blocks and then one by one, as long as the run still fails; return the others.

    The result is 1-minimal if the attempts suffice: the run no longer fails in this way if one more switch is removed.

    Args:
        switches: choice -> rank of a schedule that fails.
        fails: runs a schedule of these switches; returns the switches that it made if it failed in the same way, else
            None.
        attempts: the largest number of runs.

    Source: Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28 (2002).
    """
    best = dict(switches)
    size = len(best)
    while size >= 1 and attempts > 0:
        shorter = None
        items = sorted(best.items())
        for start in reversed(range(0, len(items), size)):  # the last first, so that the run before it stays the same
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
