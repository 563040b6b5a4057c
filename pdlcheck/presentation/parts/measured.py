"""The sections on one run: its experiments, all its rows, and the comparison of functions that took turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pdlcheck.bench.experiments import Experiment, Plot, Point
from pdlcheck.comparison.runs import Run
from pdlcheck.presentation.document import Chart, Finding, Grid, Line, Section, Tone, Words
from pdlcheck.report.measured import measured_cells

__all__ = ["experiments_section", "ratios_section", "rows_of", "rows_section"]


def rows_of(run: Run) -> list[tuple[str, dict[str, object]]]:
    """Return the name and facts of the rows; rows that were not measured on ranks have a median without an interval."""
    return [(row.name, _with_median(row.seconds) | {**row.facts}) for row in run.rows.values()]


def _with_median(seconds: Sequence[float]) -> dict[str, object]:
    return dict.fromkeys(("median_s", "median_low_s", "median_high_s"), statistics.median(seconds))


def experiments_section(found: Sequence[Experiment], title: str) -> Section:
    """Return a finding for each experiment; experiments whose model does not hold come first."""
    verdicts: dict[bool | None, tuple[str, Tone]] = {
        True: ("the model holds", "good"),
        False: ("the model does not hold", "bad"),
        None: ("", ""),
    }
    ordered = sorted(found, key=lambda one: one.held is not False)
    return Section(title, [Finding(one.title, one.sentence, *verdicts[one.held], one.plot) for one in ordered])


def ratios_section(run: Run, title: str) -> Section | None:
    """Return the comparison of every function with those that it took turns with; None if there is none."""
    points = [
        Point(f"{name} / {way}", *ratio)
        for name, facts in rows_of(run)
        for way, ratio in _ratios(facts)
        if min(ratio) > 0 and math.isfinite(max(ratio))
    ]
    if not points:
        return None
    plot = Plot("", "time of the function / time of the other", {"ratio": points}, log_y=True, levels={"as fast": 1.0})
    words = (
        "Below 1 the function is faster than the other one. A line is the 95 % interval; where it crosses 1, the run "
        "does not tell them apart."
    )
    return Section(title, [Words(words), Chart("ratio of times, with intervals", plot)])


def _ratios(facts: dict[str, object]) -> list[tuple[str, Sequence[float]]]:
    """Return the ratios of a row, without functions that are a part of the first one or a limit of it."""
    over, parts = facts.get("over"), facts.get("parts")
    left_out = parts if isinstance(parts, list) else []
    return [(way, ratio) for way, ratio in over.items() if way not in left_out] if isinstance(over, dict) else []


def rows_section(run: Run, title: str) -> Section | None:
    """Return the table of all rows; None if there are no rows."""
    rows = rows_of(run)
    if not rows:
        return None
    columns, lines = measured_cells(rows)
    marked = [Line(line, minor="way" in facts) for line, (_, facts) in zip(lines, rows, strict=True)]
    words = "The median over rounds of the slowest rank, with the 95 % interval of the median."
    return Section(title, [Words(words), Grid(title, columns, marked, "functions that others are compared with")])
