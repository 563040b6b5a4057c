"""The rows of a run, found by the parts of their names: test, number of ranks, other parameters, function."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pdlcheck.bench.experiments.experiment import Point

__all__ = ["Row", "Rows", "as_ms", "as_ranks"]

Row = tuple[str, Mapping[str, Any]]  # name and facts

_NAME = re.compile(r"(?P<test>\w+)(?:\[(?P<ranks>\d+)ranks(?:-(?P<rest>[^\]]*))?\])?(?: \[(?P<way>[^\]]+)\])?")


class Rows:
    """The rows of one run; seconds are medians."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._seconds: dict[str, dict[tuple[int, str], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        self._facts: dict[tuple[str, int, str, str], Mapping[str, Any]] = {}
        for name, facts in rows:
            parts = _NAME.fullmatch(name)
            if parts is None or parts["ranks"] is None or "median_s" not in facts:
                continue
            ranks, rest, way = int(parts["ranks"]), parts["rest"] or "", parts["way"] or ""
            self._seconds[parts["test"]][ranks, rest][way] = facts["median_s"]
            self._facts[parts["test"], ranks, rest, way] = facts

    def of(self, test: str) -> dict[tuple[int, str], dict[str, float]]:
        """Return the seconds of the functions, by number of ranks and parameters; ``""`` is the first function."""
        return dict(self._seconds.get(test, {}))

    def by_ranks(self, test: str, rest: str = "") -> dict[int, float]:
        """Return the seconds of the first function by number of ranks, sorted."""
        found = {ranks: ways[""] for (ranks, other), ways in self.of(test).items() if other == rest and "" in ways}
        return dict(sorted(found.items()))

    def facts(self, test: str, ranks: int, rest: str = "", way: str = "") -> Mapping[str, Any]:
        """Return the facts of an existing row."""
        return self._facts[test, ranks, rest, way]

    def point(
        self, x: float | str, test: str, ranks: int, rest: str = "", way: str = "", *, scale: float = 1e3
    ) -> Point:
        """Return the row's seconds times ``scale``, with their interval, at position ``x`` of a plot."""
        facts = self.facts(test, ranks, rest, way)
        median: float = facts["median_s"]
        low, high = facts.get("median_low_s", median), facts.get("median_high_s", median)
        return Point(x, scale * median, scale * low, scale * high)


def as_ms(seconds: float) -> str:
    """Return milliseconds with three digits."""
    return f"{seconds * 1e3:.3g} ms"


def as_ranks(number: int) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return "1 rank" if number == 1 else f"{number} ranks"
