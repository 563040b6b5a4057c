"""The section on the machines, versions and commits of the runs."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.comparison.runs import Run, short_names
from pdlcheck.comparison.tables import machine_lines
from pdlcheck.presentation.document import Grid, Line, Section
from pdlcheck.report.measured import Cell

__all__ = ["machines_section"]


def machines_section(runs: Sequence[Run]) -> Section:
    """Return a table with a column for each run."""
    lines = [Line([Cell(name), *map(Cell, values)]) for name, values in machine_lines(runs)]
    grid = Grid("hardware", ["", *short_names(runs)], lines, can_be_sorted=False)
    return Section("machine" if len(runs) == 1 else "machines", [grid])
