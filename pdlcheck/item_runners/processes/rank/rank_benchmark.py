"""The rank's part of the fixture ``rank_benchmark``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from pdlcheck.bench.records import RankRecord
from pdlcheck.bench.timing import Rounds, time_in_turns

__all__ = ["call_once", "named", "time_on_rank"]


def named(
    fn: Callable[..., Any], against: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
) -> dict[str, Callable[..., Any]]:
    """Return the functions by name, the subject first.

    Raises:
        ValueError: two functions have the same name.
    """
    if callable(against):
        against = {_name(against): against}
    ways = {_name(fn): fn}
    for name, other in (against or {}).items():
        if name in ways:
            raise ValueError(f"rank_benchmark: two functions are called {name!r}; pass against={{'a name': function}}")
        ways[name] = other
    return ways


def time_on_rank(
    ways: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    rounds: Rounds,
    *,
    setup: Callable[[], object] | None,
    check: Callable[[Any], int | None] | None,
    device: torch.device | None,
) -> tuple[Any, RankRecord, dict[str, int]]:
    """Time the functions; return the subject's result, the times, and the number of wrong elements of each function."""
    __tracebackhide__ = True
    calls = {name: partial(way, *args) for name, way in ways.items()}
    results, record, wrong = time_in_turns(calls, rounds, setup=setup, check=check, device=device)
    _require_right(wrong)
    return results[next(iter(ways))], record, wrong


def call_once(
    ways: Mapping[str, Callable[..., Any]],
    args: tuple[Any, ...],
    *,
    setup: Callable[[], object] | None,
    check: Callable[[Any], int | None] | None,
) -> Any:
    """Call each function once and check its result, without timing; return the subject's result."""
    __tracebackhide__ = True
    results, wrong = {}, {}
    for name, way in ways.items():
        if setup is not None:
            setup()
        results[name] = way(*args)
        if check is not None:  # check now, because the next function may write to the same tensor
            wrong[name] = int(check(results[name]) or 0)
    _require_right(wrong)
    return results[next(iter(ways))]


def _require_right(wrong: Mapping[str, int]) -> None:
    __tracebackhide__ = True
    for name, number in wrong.items():
        if number:
            raise AssertionError(f"rank_benchmark: {name} returned {number} wrong elements; its times do not count")


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)
