"""The fixture ``benchmark`` in ranks: each has a row of its own, as ranks need not take equally long."""

from __future__ import annotations

from typing import Any

import pytest

from pdlcheck.worlds.processes.exchange.journal import note

__all__ = ["name_benchmark", "note_benchmarks", "of_rank"]

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


def name_benchmark(value: object, rank: int) -> None:
    """On a simulated rank, of the value of a fixture: what that measures gets the same name."""
    own: Any = value
    if type(own).__module__ == "pytest_benchmark.fixture":
        own.name, own.fullname = of_rank(own.name, rank), of_rank(own.fullname, rank)


def of_rank(name: str, rank: int) -> str:
    """Return the name of a row of one rank."""
    return f"{name} [rank {rank}]"
