"""pytest-benchmark tells what ranks have measured: each has a line of its own, as they need not take equally long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdlcheck.worlds.processes.exchange.journal import note

__all__ = ["name_benchmark", "note_benchmarks", "tell_benchmarks"]

_noted = pytest.StashKey[int]()  # how many of the session


def note_benchmarks(item: pytest.Function) -> None:
    """In a rank: note what the test has measured since the last time."""
    session: Any = getattr(item.config, "_benchmarksession", None)
    if session is None or "benchmark" not in item.fixturenames:
        return
    for one in session.benchmarks[item.config.stash.get(_noted, 0) :]:
        if one and not one.has_error:
            options = {name: getattr(value, "__name__", value) for name, value in one.options.items()}
            noted = {"group": one.group, "extra_info": one.extra_info, "options": options}
            note("benchmark", noted | {"iterations": one.iterations, "seconds": one.stats.data})
    item.config.stash[_noted] = len(session.benchmarks)


def tell_benchmarks(item: pytest.Item, noted: list[list[Any]]) -> None:
    """In the controller: as if its own fixture had measured them; ``noted`` is by rank."""
    session: Any = getattr(item.config, "_benchmarksession", None)
    if session is None or not any(noted):
        return
    from pytest_benchmark import stats

    made: Any = stats.Metadata  # it has no types
    for rank, one in [(rank, one) for rank, own in enumerate(noted) for one in own]:
        fixture = SimpleNamespace(
            name=_of_rank(item.name, rank),
            fullname=_of_rank(item.nodeid, rank),
            group=one["group"],
            param=item.callspec.id,  # type: ignore[attr-defined]  # a Function
            params=item.callspec.params,  # type: ignore[attr-defined]
            extra_info=one["extra_info"],
            cprofile_stats=None,
            has_error=False,
        )
        measured = made(fixture, one["iterations"], one["options"])
        for seconds in one["seconds"]:
            measured.stats.update(seconds)
        session.benchmarks.append(measured)


def name_benchmark(value: object, rank: int) -> None:
    """On a simulated rank, of the value of a fixture: what that measures gets the same name."""
    own: Any = value
    if type(own).__module__ == "pytest_benchmark.fixture":
        own.name, own.fullname = _of_rank(own.name, rank), _of_rank(own.fullname, rank)


def _of_rank(name: str, rank: int) -> str:
    return f"{name} [rank {rank}]"
