"""Search for the loosest setting of a solver whose true error is small enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ranking.peer import Setting

__all__ = ["Tuned", "tune"]

Answer = dict[str, Any]  # of one solve: error and seconds, or failed
FACTOR = 8  # between the tolerances of the first search
FINE = 1.25  # ratio at which the second search stops


@dataclass(frozen=True)
class Tuned:
    """The found ``setting``, or the reason ``why`` there is none; ``error`` is its true error, or the best one seen."""

    setting: Setting = None
    error: float | None = None
    why: str = ""


def tune(solve: Callable[[Setting], Answer], first: Setting, wanted: float) -> Tuned:
    """Search for the loosest setting with a true error of at most ``wanted``, from ``first`` on.

    Tolerances are tried by factors of 8, then halfway between the last good and the last bad one until these lie within
    1.25. Numbers of iterations are tried by factors of 2, then by bisection. The search ends after two settings in a
    row that did not lower the error.
    """
    good: tuple[Setting, float] | None = None
    bad: Setting = None
    setting, best, stuck = first, math.inf, 0
    for _ in range(20):
        answer = solve(setting)
        if "failed" in answer:
            if good is None:
                return Tuned(error=best if best < math.inf else None, why=answer["failed"])
            bad = setting
            break
        error = answer["error"]
        if error <= wanted:
            good = setting, error
            if bad is not None or first is None or (looser := _looser(setting)) is None:
                break
            setting = looser
            continue
        if first is None:
            return Tuned(error=error, why="never")
        bad = setting
        if good is not None:
            break
        stuck = 0 if error < 0.9 * best else stuck + 1
        best = min(best, error)
        if stuck == 2 or not math.isfinite(error):
            return Tuned(error=best if math.isfinite(best) else error, why="never")
        setting = _tighter(setting)
    if good is None:
        return Tuned(error=best, why="never")
    while bad is not None and (between := _between(good[0], bad)) is not None:
        answer = solve(between)
        if "failed" in answer or answer["error"] > wanted:
            bad = between
        else:
            good = between, answer["error"]
    return Tuned(*good)


def _tighter(setting: Setting) -> Setting:
    assert setting is not None
    return setting * 2 if isinstance(setting, int) else setting / FACTOR


def _looser(setting: Setting) -> Setting:
    assert setting is not None
    if isinstance(setting, int):
        return setting // 2 if setting > 1 else None
    return setting * FACTOR if setting < 1e3 else None


def _between(good: Setting, bad: Setting) -> Setting:
    """Return a setting between the two, or None if they are close enough."""
    assert good is not None
    assert bad is not None
    if isinstance(good, int):
        return (good + int(bad)) // 2 if good - bad > 1 else None
    return math.sqrt(good * bad) if bad / good > FINE else None
