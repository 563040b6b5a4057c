"""Pairs the rows of two runs and says which became slower.

Two runs of the same code differ, as machines are shared: the whole of a run may be slower. So a row that has a
counterpart in its own run (torch's function, which took turns with it) is judged by two ratios: of its times in both
runs, and of its times over those of the counterpart in both runs. It became slower where both did. A row without one is
judged beside the shift that all rows of the run have in common.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pdlcheck.bench.intervals import Interval, unpaired_ratio
from pdlcheck.comparison.runs import Measured, Run

__all__ = ["Comparison", "Pair", "compare"]

Verdict = Literal["slower", "faster", "as fast", "unclear"]


@dataclass(frozen=True)
class Pair:
    """One row in both runs.

    Args:
        name: of the row.
        ratio: of the times, second run over first.
        relative: the same, over that of the counterparts; None without one.
        verdict: of the second run.
    """

    name: str
    ratio: Interval
    relative: Interval | None
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Args:
        base: the first run.
        other: the second run.
        pairs: rows that are in both.
        shift: the median ratio of all rows.
        only_base: names of rows that are in the first run alone.
        only_other: names of rows that are in the second run alone.
    """

    base: Run
    other: Run
    pairs: tuple[Pair, ...]
    shift: float
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]

    @property
    def slower(self) -> list[Pair]:
        """The rows that became slower."""
        return [pair for pair in self.pairs if pair.verdict == "slower"]


def compare(base: Run, other: Run, limit: float) -> Comparison:
    """Compare the rows that are in both runs.

    Args:
        base: the first run, such as that of the main branch.
        other: the second run.
        limit: a row whose times grew by this ratio became slower; above 1.
    """
    shared = [name for name in base.rows if name in other.rows]
    ratios = {name: unpaired_ratio(other.rows[name].seconds, base.rows[name].seconds) for name in shared}
    shift = statistics.median(ratio.value for ratio in ratios.values()) if ratios else 1.0
    pairs = []
    for name in shared:
        relative = _relative(base.rows, other.rows, name)
        pairs.append(Pair(name, ratios[name], relative, _verdict(ratios[name], relative, shift, limit)))
    return Comparison(
        base,
        other,
        tuple(pairs),
        shift,
        tuple(name for name in base.rows if name not in other.rows),
        tuple(name for name in other.rows if name not in base.rows),
    )


def _relative(base: Mapping[str, Measured], other: Mapping[str, Measured], name: str) -> Interval | None:
    """The ratio of the ratios to the first counterpart that both runs have; the intervals of both are added."""
    for counterpart, row in base.items():
        if row.subject == name and counterpart in other and other[counterpart].subject == name:
            way = row.facts["way"]
            before, after = (rows[name].facts.get("over", {}).get(way) for rows in (base, other))
            if before is None or after is None:
                continue
            value = after[0] / before[0]
            low, high = after[1] / before[2], after[2] / before[1]
            return Interval(value, low, high)
    return None


def _verdict(ratio: Interval, relative: Interval | None, shift: float, limit: float) -> Verdict:
    judged = [ratio, relative if relative is not None else Interval(*(part / shift for part in ratio))]
    if all(one.value >= limit and one.low > 1 for one in judged):
        return "slower"
    if all(one.value <= 1 / limit and one.high < 1 for one in judged):
        return "faster"
    return "as fast" if all(1 / limit < one.low and one.high < limit for one in judged) else "unclear"
