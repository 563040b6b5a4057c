"""The fixture ``rank_benchmark`` where the body of the test runs on the ranks, and what it calls there."""

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
        ValueError: two of them have the same name.
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
    """Time the functions; return the subject's result, the times and the wrong elements of each function."""
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
    """Call each function once, check its result and time nothing; return the subject's result."""
    __tracebackhide__ = True
    results, wrong = {}, {}
    for name, way in ways.items():
        if setup is not None:
            setup()
        results[name] = way(*args)
        if check is not None:  # before the next one writes the same tensor
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
