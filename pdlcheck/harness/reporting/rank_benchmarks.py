"""The fixture ``benchmark`` in ranks: each rank has its own row, because ranks may differ in speed."""

from __future__ import annotations

from typing import Any

import pytest

from pdlcheck.compat.pytest_benchmark import session_of
from pdlcheck.worlds.journal import note

__all__ = ["name_benchmark", "note_benchmarks", "of_rank"]

_noted = pytest.StashKey[int]()  # how many benchmarks of the session have been noted


def note_benchmarks(item: pytest.Function) -> None:
    """Note, in a rank, what the test has measured since the last call."""
    session = session_of(item.config)
    if session is None or "benchmark" not in item.fixturenames:
        return
    for one in session.benchmarks[item.config.stash.get(_noted, 0) :]:
        if one and not one.has_error:
            options = {name: getattr(value, "__name__", value) for name, value in one.options.items()}
            noted = {"group": one.group, "extra_info": one.extra_info, "options": options}
            note("benchmark", noted | {"iterations": one.iterations, "seconds": one.stats.data})
    item.config.stash[_noted] = len(session.benchmarks)


def name_benchmark(value: object, rank: int) -> None:
    """Add the rank to the names of a ``benchmark`` fixture on a simulated rank; leave other values as they are."""
    own: Any = value
    if type(own).__module__ == "pytest_benchmark.fixture":
        own.name, own.fullname = of_rank(own.name, rank), of_rank(own.fullname, rank)


def of_rank(name: str, rank: int) -> str:
    """Return the name of one rank's row."""
    return f"{name} [rank {rank}]"
