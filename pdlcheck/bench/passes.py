"""One measurement in several passes: each pass runs all benchmarks in new processes, minutes after the previous one.

Rounds of one pass resemble each other: they have the same processes on the same cores, in the same minute of a shared
machine. So an interval that should hold for the next run needs passes. Their number counts, not the number of rounds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pdlcheck.bench.intervals import CONFIDENCE, Interval, median_interval, paired_ratio
from pdlcheck.bench.student_t import quantile

__all__ = ["merge_rows", "pass_ratios", "pass_values", "passes_interval"]

_ENOUGH = 3  # passes for an interval: with two passes, Student's t is thirteen times the spread
_PSEUDO_PASSES = 5  # for a file with one pass: consecutive parts of its rounds


def merge_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the rows of several passes by their full names.

    Args:
        rows: rows in the form that pytest-benchmark stores; the rows of the first pass come first.

    Returns:
        Rows with the rounds of all passes, one after the other; ``extra_info["pass_rounds"]`` holds the number of
        rounds of each pass. The statistics and intervals cover all rounds.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in rows:
        known = found.setdefault(one["fullname"], {**one, "data": [], "pass_rounds": []})
        known["data"] += one["stats"]["data"]
        known["pass_rounds"].append(len(one["stats"]["data"]))
    for row in found.values():
        data, rounds = row.pop("data"), row.pop("pass_rounds")
        row["stats"] = _stats(data, row["stats"]["iterations"])
        row["extra_info"] = {**row["extra_info"], "pass_rounds": rounds}
    for row in found.values():
        row["extra_info"] |= _times(row, found)
    return list(found.values())


def pass_values(seconds: Sequence[float], pass_rounds: Sequence[int] | None) -> list[float]:
    """Return the median of each pass; if there is only one pass, the medians of parts of its rounds."""
    return [statistics.median(part) for part in _by_pass(seconds, pass_rounds)]


def pass_ratios(
    ours: Sequence[float], others: Sequence[Sequence[float]], pass_rounds: Sequence[int] | None
) -> list[float]:
    """Return, for each pass, the ratio of a function's seconds to those of functions that took turns with it.

    The ratio is the trimmed mean of the logarithms of the rounds. A minute in which the machine was slow affects both
    sides of a round, and an interrupted round does not count.
    """
    per_round = [
        math.log(max(own, 1e-12)) - statistics.fmean(math.log(max(one, 1e-12)) for one in theirs)
        for own, *theirs in zip(ours, *others, strict=True)
    ]
    return [math.exp(_trimmed_mean(part)) for part in _by_pass(per_round, pass_rounds)]


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    left_out = len(values) // 4
    return statistics.fmean(sorted(values)[left_out : len(values) - left_out])


def _by_pass(values: Sequence[float], pass_rounds: Sequence[int] | None) -> list[Sequence[float]]:
    if pass_rounds is None or len(pass_rounds) < 2:
        parts = min(_PSEUDO_PASSES, len(values))
        edges = [len(values) * part // parts for part in range(parts + 1)]
    else:
        edges = [sum(pass_rounds[:place]) for place in range(len(pass_rounds) + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(edges)]


def passes_interval(values: Sequence[float]) -> Interval:
    """Return the geometric mean of positive values, one for each pass, with its 95 % interval by Student's t.

    Example:
        >>> passes_interval([2.0, 2.0])
        Interval(value=2.0, low=2.0, high=2.0)
    """
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    half = quantile((1 + CONFIDENCE) / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(*(round(math.exp(one), 12) for one in (mean, mean - half, mean + half)))


def _stats(data: Sequence[float], iterations: int) -> dict[str, Any]:
    from pytest_benchmark.stats import Stats

    made: Any = Stats()  # type: ignore[no-untyped-call]  # it has no types
    for seconds in data:
        made.update(seconds)
    return {**made.as_dict(), "data": list(data), "iterations": iterations}


def _times(row: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    facts, data = row["extra_info"], row["stats"]["data"]
    if "median_s" not in facts:  # a row of pytest-benchmark's own fixture
        return {}
    values = pass_values(data, facts["pass_rounds"])
    interval = passes_interval(values) if len(facts["pass_rounds"]) >= _ENOUGH else median_interval(data)
    found: dict[str, Any] = {
        "median_s": statistics.median(data),
        "median_low_s": interval.low,
        "median_high_s": interval.high,
    }
    for name, per_byte in (("algbw_GBps", 1), ("busbw_GBps", facts.get("busbw_GBps", 0) / facts.get("algbw_GBps", 1))):
        if name in facts:
            found[name] = per_byte * facts["nbytes"] / found["median_s"] / 1e9
    if "over" in facts:
        ways = {way: rows[f"{row['fullname']} [{way}]"] for way in facts["over"]}
        found["over"] = {way: [*_ratio(row, other)] for way, other in ways.items()}
    return found


def _ratio(row: Mapping[str, Any], other: Mapping[str, Any]) -> Interval:
    ours, theirs = row["stats"]["data"], other["stats"]["data"]
    rounds = row["extra_info"]["pass_rounds"]
    if len(rounds) < _ENOUGH:
        return paired_ratio(ours, theirs)
    return passes_interval(pass_ratios(ours, [theirs], rounds))
