"""The output of a comparison: a table for the terminal, Markdown for a pull request, and JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdlcheck.comparison.pairs import Comparison, Pair
from pdlcheck.comparison.runs import Run, short_names
from pdlcheck.report.measured import seconds_text
from pdlcheck.report.tables import BAD, GOOD, count, print_whole

__all__ = [
    "as_json",
    "as_markdown",
    "machine_lines",
    "markdown_table",
    "pair_cells",
    "pair_titles",
    "print_comparisons",
    "sentences",
]

_STYLES = {"slower": BAD, "faster": GOOD, "unclear": "dim", "reference": "dim", "as fast": ""}

_JUDGED_BY = {"ratio": "of its ratio", "shift": "less the shift", "time": "of its time"}


def print_comparisons(console: Console, found: Sequence[Comparison], limit: float) -> None:
    """Print the machines, a table for each comparison, and a sentence with the verdict."""
    runs = [found[0].base, *(one.other for one in found)]
    console.print(_machines(runs))
    for one in found:
        table = Table(box=box.SIMPLE_HEAD)
        for place, title in enumerate(pair_titles(one)):
            table.add_column(title, justify="left" if place == 0 else "right", no_wrap=True)
        for pair in one.pairs:
            table.add_row(*map(Text, pair_cells(pair)), style=_STYLES[pair.verdict])
        print_whole(console, table)
        for sentence in sentences(one, limit):
            console.print(Text(sentence), soft_wrap=True)


def as_markdown(found: Sequence[Comparison], limit: float) -> str:
    """Return the same as Markdown: the changed rows come first, and all rows are folded."""
    runs = [found[0].base, *(one.other for one in found)]
    parts = [markdown_table(["", *short_names(runs)], [[name, *values] for name, values in machine_lines(runs)])]
    for one in found:
        parts.append("\n".join(sentences(one, limit)))
        changed = [pair for pair in one.pairs if pair.verdict in ("slower", "faster")]
        if changed:
            parts.append(markdown_table(pair_titles(one), [pair_cells(pair) for pair in changed]))
        table = markdown_table(pair_titles(one), [pair_cells(pair) for pair in one.pairs])
        parts.append(f"<details><summary>all {count(len(one.pairs), 'row')}</summary>\n\n{table}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def as_json(found: Sequence[Comparison], limit: float) -> str:
    """Return the same as JSON."""
    comparisons = [
        {
            "base": str(one.base.path),
            "other": str(one.other.path),
            "shift": one.shift,
            "rows": [
                {
                    "name": pair.name,
                    "seconds": pair.seconds,
                    "ratio": [part if math.isfinite(part) else None for part in pair.ratio],
                    "relative": [part if math.isfinite(part) else None for part in pair.relative],
                    "judged_by": pair.judged_by,
                    "verdict": pair.verdict,
                }
                for pair in one.pairs
            ],
            "only_base": one.only_base,
            "only_other": one.only_other,
        }
        for one in found
    ]
    machines = [dict(one.machine) for one in [found[0].base, *(one.other for one in found)]]
    return json.dumps({"limit": limit, "machines": machines, "comparisons": comparisons}, indent=1)


def pair_titles(one: Comparison) -> list[str]:
    """Return the column titles of the table of a comparison."""
    base, other = short_names([one.base, one.other])
    return ["benchmark", base, other, "ratio of times (95 %)", "judged by (95 %)", "verdict"]


def pair_cells(pair: Pair) -> list[str]:
    """Return a row of that table."""
    judged = f"{_interval(pair.relative)} {_JUDGED_BY[pair.judged_by]}"
    return [
        pair.name,
        *map(seconds_text, pair.seconds),
        _interval(pair.ratio),
        "" if pair.verdict == "reference" else judged,
        "" if pair.verdict == "reference" else pair.verdict,
    ]


def _interval(found: Any) -> str:
    value, low, high = found
    return f"{value:.2f} ({low:.2f} .. {high:.2f})" if high < 1000 else f"{value:.2f}"


def sentences(one: Comparison, limit: float) -> list[str]:
    """Return the verdict and its limitations."""
    base, other = short_names([one.base, one.other])
    slower = one.slower
    verdict = f"no row of {other} is slower than in {base} by {limit:g} or more, as far as {one.passes} passes show"
    if slower:
        names = ", ".join(pair.name for pair in slower)
        verdict = f"slower in {other} than in {base}: {count(len(slower), 'row')}: {names}"
    found = [verdict, f"all rows together: {one.shift:.2f} times the time of {base}"]
    unclear = sum(pair.verdict == "unclear" for pair in one.pairs)
    if unclear:
        found.append(
            f"unclear: {count(unclear, 'row')}, whose intervals are too wide for {limit:g}: measure longer (--full), "
            "in more passes, or on a machine that is free"
        )
    if one.passes < 3:
        found.append("intervals are too narrow: measure in passes, with `pdlcheck bench --passes 3`")
    for alone, run in ((one.only_base, base), (one.only_other, other)):
        if alone:
            found.append(f"{count(len(alone), 'row')} only in {run}: {', '.join(alone[:3])}{' ...' * (len(alone) > 3)}")
    return found


def machine_lines(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return a line for each property of the machines and commits, with the values of all runs."""
    names = dict.fromkeys(name for run in runs for name in run.machine)
    lines = [(name, [run.machine.get(name, "-") for run in runs]) for name in names]
    return [*lines, ("commit", [run.commit or "-" for run in runs]), ("measured", [run.moment or "-" for run in runs])]


def _machines(runs: Sequence[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("", *short_names(runs)):
        table.add_column(title, overflow="fold")
    for name, values in machine_lines(runs):
        table.add_row(name, *map(Text, values))
    return table


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
