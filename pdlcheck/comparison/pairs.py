"""The comparison of two runs: it pairs their rows and reports the rows that became slower.

On a shared machine, all rows may be slower a minute later. So the unit is a pass, not a round. A row that took turns
with other functions of its run (those of torch) is judged by its ratio to them. Any other row is judged by its times
relative to the shift that all rows have in common. With few rows, a slower machine cannot be distinguished from slower
code that all rows share, so each row is judged by its time. Welch's test compares the passes of both runs, and Holm's
correction accounts for the number of judged rows.

Source: Welch, Biometrika 34 (1947); Holm, Scand. J. Statist. 6 (1979).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pdlcheck.bench.intervals import Interval
from pdlcheck.bench.passes import pass_ratios, pass_values
from pdlcheck.bench.student_t import beyond, quantile
from pdlcheck.comparison.runs import Measured, Run

__all__ = ["Comparison", "Pair", "compare"]

Verdict = Literal["slower", "faster", "as fast", "unclear", "reference"]
JudgedBy = Literal["ratio", "shift", "time"]
_ENOUGH_ROWS = 8  # shared rows, so that one changed function does not move the shift
_SIGNIFICANT = 0.05  # the level for all rows together
_EXACT = 1e-12  # logarithms with a smaller difference count as equal


@dataclass(frozen=True)
class Pair:
    """One row in both runs.

    Args:
        name: name of the row.
        seconds: medians of both runs.
        ratio: ratio of the times, second run over first.
        relative: the ratio by which the row is judged.
        judged_by: ``ratio``, by its ratios to the functions that it took turns with; ``shift``, by its times relative
            to the shift of all rows; or ``time``, by its times.
        verdict: the verdict on the second run; ``reference`` for a function that others are compared with.
    """

    name: str
    seconds: tuple[float, float]
    ratio: Interval
    relative: Interval
    judged_by: JudgedBy
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Args:
        base: the first run.
        other: the second run.
        pairs: rows that are in both.
        shift: the median ratio of the times of all rows.
        passes: the smaller number of passes of both.
        only_base: names of rows that are only in the first run.
        only_other: names of rows that are only in the second run.
    """

    base: Run
    other: Run
    pairs: tuple[Pair, ...]
    shift: float
    passes: int
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]

    @property
    def slower(self) -> list[Pair]:
        """Return the rows that became slower."""
        return [pair for pair in self.pairs if pair.verdict == "slower"]


def compare(base: Run, other: Run, limit: float) -> Comparison:
    """Compare the rows that are in both runs.

    Args:
        base: the first run, such as a run of the main branch.
        other: the second run.
        limit: a row became slower if its relative time grew significantly and by at least this ratio; above 1.

    Raises:
        ValueError: ``limit`` is 1 or below.
    """
    if not limit > 1:
        raise ValueError(f"limit must be above 1, such as 1.1 for 10 % more time; got {limit}")
    shared = [name for name in base.rows if name in other.rows]
    logs = [{name: _logs(run.rows[name]) for name in shared} for run in (base, other)]
    differences = [statistics.fmean(logs[1][name]) - statistics.fmean(logs[0][name]) for name in shared]
    shift = statistics.median(differences) if shared else 0.0
    machine = shift if len(shared) >= _ENOUGH_ROWS else 0.0
    unpaired: JudgedBy = "shift" if len(shared) >= _ENOUGH_ROWS else "time"
    judged = {}
    for name in shared:
        ways = [way for way in shared if base.rows[way].subject == name == other.rows[way].subject]
        judged[name] = (bool(ways), [_relative(run.rows, name, ways) for run in (base, other)])
    subjects = [name for name in shared if base.rows[name].subject is None]
    significant = _significant({name: judged[name][1] for name in subjects})
    pairs = []
    for name in shared:
        is_paired, (before, after) = judged[name]
        relative = _interval(before, after, 0.0 if is_paired else machine)
        ratio = _interval(logs[0][name], logs[1][name], 0.0)
        verdict: Verdict = "reference"
        if name in subjects:
            verdict = _verdict(relative, ratio, machine, limit, name in significant)
        medians = (statistics.median(base.rows[name].seconds), statistics.median(other.rows[name].seconds))
        pairs.append(Pair(name, medians, ratio, relative, "ratio" if is_paired else unpaired, verdict))
    return Comparison(
        base,
        other,
        tuple(pairs),
        math.exp(shift),
        min((_passes(run.rows[name]) for run in (base, other) for name in shared), default=0),
        tuple(name for name in base.rows if name not in other.rows),
        tuple(name for name in other.rows if name not in base.rows),
    )


def _passes(row: Measured) -> int:
    return len(row.facts.get("pass_rounds") or [0])


def _logs(row: Measured) -> list[float]:
    return [math.log(max(value, 1e-12)) for value in pass_values(row.seconds, row.facts.get("pass_rounds"))]


def _relative(rows: Mapping[str, Measured], name: str, ways: Sequence[str]) -> list[float]:
    """Return, for each pass, the logarithm of the row's time over the times of the functions that took turns with it.

    Without such functions, return the logarithm of its time.
    """
    own = rows[name]
    others = [rows[way].seconds for way in ways if len(rows[way].seconds) == len(own.seconds)]
    if not others:
        return _logs(own)
    return [math.log(value) for value in pass_ratios(own.seconds, others, own.facts.get("pass_rounds"))]


def _interval(before: Sequence[float], after: Sequence[float], shift: float) -> Interval:
    """Return the ratio after / before, with its 95 % interval from the passes."""
    difference = statistics.fmean(after) - statistics.fmean(before) - shift
    spread = [len(one) > 1 and statistics.variance(one) / len(one) for one in (before, after)]
    if not all(len(one) > 1 for one in (before, after)):
        return Interval(math.exp(difference), 0.0, math.inf)
    half = quantile(0.975, _freedom(before, after)) * math.sqrt(sum(spread))
    return Interval(*(math.exp(difference + sign * half) for sign in (0, -1, 1)))


def _freedom(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the degrees of freedom of Welch's test."""
    parts = [(statistics.variance(one) / len(one), len(one) - 1) for one in (before, after)]
    below = sum(part**2 / freedom for part, freedom in parts)
    return sum(part for part, _ in parts) ** 2 / below if below else min(freedom for _, freedom in parts)


def _significant(rows: Mapping[str, Sequence[Sequence[float]]]) -> set[str]:
    """Return the names whose passes differ between the runs, by Welch's test with Holm's correction."""
    found = {}
    for name, (before, after) in rows.items():
        if len(before) > 1 and len(after) > 1:
            difference = abs(statistics.fmean(after) - statistics.fmean(before))
            error = math.sqrt(sum(statistics.variance(one) / len(one) for one in (before, after)))
            if error > _EXACT:
                found[name] = 2 * beyond(difference / error, _freedom(before, after))
            elif difference > _EXACT:
                found[name] = 0.0
    significant = set()
    for place, (name, value) in enumerate(sorted(found.items(), key=lambda one: one[1])):
        if value > _SIGNIFICANT / (len(found) - place):
            break
        significant.add(name)
    return significant


def _verdict(relative: Interval, ratio: Interval, shift: float, limit: float, is_significant: bool) -> Verdict:
    if is_significant and relative.value >= limit and ratio.value > math.exp(shift):
        return "slower"
    if is_significant and relative.value <= 1 / limit and ratio.value < math.exp(shift):
        return "faster"
    return "as fast" if 1 / limit < relative.low and relative.high < limit else "unclear"
