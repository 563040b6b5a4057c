"""The private names of pytest-benchmark. Does not import it."""

from __future__ import annotations

from typing import Any

import pytest

from pdlcheck.compat.private import uses

__all__ = ["is_used", "least_rounds", "longest_s", "session_of", "use"]


@uses("pytest_benchmark.plugin.pytest_configure._benchmarksession", lost="rows of benchmarks that ranks have measured")
def session_of(config: pytest.Config) -> Any:
    """Return the session of pytest-benchmark, which has the rows; None without the plugin."""
    return getattr(config, "_benchmarksession", None)


@uses("pytest_benchmark.fixture.BenchmarkFixture._min_rounds", lost="--benchmark-min-rounds for ranks")
def least_rounds(benchmark: Any) -> int:
    """Return the least number of rounds that the options and markers of a test ask for."""
    return benchmark._min_rounds  # type: ignore[no-any-return]


@uses("pytest_benchmark.fixture.BenchmarkFixture._max_time", lost="--benchmark-max-time for ranks")
def longest_s(benchmark: Any) -> float:
    """Return the seconds that the rounds of a benchmark may take."""
    return benchmark._max_time  # type: ignore[no-any-return]


@uses("pytest_benchmark.fixture.BenchmarkFixture._mode", lost="the error at a second measurement in one test")
def is_used(benchmark: Any) -> bool:
    """Return whether a test has measured with its fixture."""
    return bool(benchmark._mode)


def use(benchmark: Any, words: str) -> None:
    """Mark the fixture of a test as used; pytest-benchmark shows the words when it is used again."""
    benchmark._mode = words
