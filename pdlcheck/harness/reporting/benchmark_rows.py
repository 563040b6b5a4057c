"""Rows that ranks have measured, added to the session of pytest-benchmark, which shows them in its tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdlcheck.compat.pytest_benchmark import session_of
from pdlcheck.harness.collection.cases import CASE, case_of
from pdlcheck.harness.reporting.rank_benchmarks import of_rank

__all__ = ["add_row", "tell_benchmarks"]


def tell_benchmarks(item: pytest.Item, noted: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Add a row for each rank that used the fixture ``benchmark``; ``noted`` is by rank."""
    for rank, own in enumerate(noted):
        for one in own:
            names = of_rank(item.name, rank), of_rank(item.nodeid, rank)
            add_row(item, names, one["group"], one["extra_info"], one["iterations"], one["seconds"], one["options"])


def add_row(
    item: pytest.Item,
    names: tuple[str, str],
    group: str | None,
    extra_info: dict[str, Any],
    iterations: int,
    seconds: Sequence[float],
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Add a row, as if the fixture of this process had measured it; return it, or None without pytest-benchmark.

    Args:
        item: the test.
        names: the name of the row, and the full name with the file.
        group: name of the group of rows that belong together.
        extra_info: columns of the JSON.
        iterations: calls in one sample.
        seconds: time of each sample, divided by its iterations.
        options: options of pytest-benchmark with which the row was measured.
    """
    session = session_of(item.config)
    if session is None:
        return None
    from pytest_benchmark import stats

    made: Any = stats.Metadata  # its module has no type annotations
    case, callspec = case_of(item), getattr(item, "callspec", None)
    params = {} if callspec is None else {name: value for name, value in callspec.params.items() if name != CASE}
    fixture = SimpleNamespace(
        name=names[0],
        fullname=names[1],
        group=group,
        param=None if callspec is None else callspec.id,
        params=params if case is None else {"world_size": case.world_size} | params,
        extra_info=extra_info,
        cprofile_stats=None,
        has_error=False,
    )
    row = made(fixture, iterations, options or {})
    for one in seconds:
        row.stats.update(one)
    session.benchmarks.append(row)
    return row
