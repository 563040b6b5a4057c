"""The section on two runs: the rows that became slower, row by row, with intervals."""

from __future__ import annotations

import math

from pdlcheck.bench.experiments import Plot, Point
from pdlcheck.comparison.pairs import Comparison
from pdlcheck.comparison.tables import pair_cells, pair_titles, sentences
from pdlcheck.presentation.document import Chart, Grid, Line, Section, Tone, Words
from pdlcheck.report.measured import Cell

__all__ = ["comparison_section"]

_TONES: dict[str, Tone] = {"slower": "bad", "faster": "good"}


def comparison_section(found: Comparison, limit: float, title: str) -> Section:
    """Return the verdict, the ratios as a plot, and the table."""
    if not found.pairs:
        words = f"{found.base.path} and {found.other.path} have no row in common: nothing is compared"
        return Section(title, [Words(words, "bad")])
    first, *others = sentences(found, limit)
    blocks: list[Words | Chart | Grid] = [Words(first, "bad" if found.slower else "good"), *map(Words, others)]
    points = [
        Point(pair.name, *pair.ratio) for pair in found.pairs if pair.ratio.low > 0 and math.isfinite(pair.ratio.high)
    ]
    if points:
        levels = {"as fast": 1.0, "limit": limit, "all rows together": found.shift}
        plot = Plot("", "time / time in the first run", {"ratio": points}, log_y=True, levels=levels)
        blocks.append(Chart("ratio of times, with intervals", plot))
    lines = []
    for pair in found.pairs:
        values = (None, *pair.seconds, pair.ratio.value, pair.relative.value, None)
        cells = [Cell(*one) for one in zip(pair_cells(pair), values, strict=True)]
        lines.append(Line(cells, _TONES.get(pair.verdict, ""), pair.verdict == "reference"))
    blocks.append(Grid(title, pair_titles(found), lines, "functions that others are compared with"))
    return Section(title, blocks)
