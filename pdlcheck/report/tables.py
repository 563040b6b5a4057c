"""The tables and lines made of records. They fit into 80 columns if the names do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pdlcheck.report.records import (
    Agreement,
    PackageRanking,
    Part,
    PropertyRecord,
    ReplicaTraining,
    Row,
    WorldTrial,
)

__all__ = [
    "agreements_table",
    "count",
    "failure",
    "heading",
    "line",
    "packages_table",
    "parts_json",
    "parts_table",
    "print_whole",
    "replicas_table",
    "row_line",
    "suites_table",
    "trial_line",
    "verdict",
]

GOOD, BAD, SKIPPED = "green", "bold red", "yellow"


def heading(console: Console, text: str) -> None:
    """Print a line that starts a part of the output."""
    console.print()
    console.print(Rule(Text(text, style="bold"), align="left", style="dim"))


def line(console: Console, text: str, *, style: str = "") -> None:
    """Print one line of text as it is: no markup, and no line break at the width of the terminal."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """Print a table without wrapping its cells; a narrower terminal wraps whole lines."""
    width = Console(width=1000).measure(table).maximum
    Console(file=console.file, width=max(console.width, width), highlight=False).print(table)


def verdict(row: Row) -> Text:
    """Return ``holds``, ``FAILS`` or ``skipped``, with the number of properties unless it applies to all of them."""
    if row.failing:
        return Text("FAILS" if row.properties == 1 else f"FAILS, {row.failing} of {row.properties}", style=BAD)
    if row.skipped == row.properties:
        return Text("skipped", style=SKIPPED)
    text = Text("holds", style=GOOD)
    return text.append(f", {row.skipped} skipped", style=SKIPPED) if row.skipped else text


def row_line(row: Row) -> str:
    """Return a row of the table of suites as a line of its own."""
    properties, examples = count(row.properties, "property"), count(row.examples, "example")
    name = f"{row.primitive:<20} {row.world:<4}"
    return f"{name} {properties:>14} {examples:>14} {row.seconds:6.1f} s  {verdict(row).plain}"


def count(number: int, noun: str) -> str:
    """Return ``1 property``, ``2 properties``, ``3 examples`` and the like."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def trial_line(trial: WorldTrial) -> str:
    """Return in one line whether a world works."""
    if trial.works:
        return f"{trial.name}: {count(trial.ranks, 'rank')} ran in {trial.seconds:.1f} s"
    return f"{trial.name}: left out: {trial.why}" + (f"; {trial.cure}" if trial.cure else "")


def suites_table(rows: Sequence[Row]) -> Table:
    """Return a table of primitive, world, properties, examples tried, verdict and seconds, with the sums below."""
    table = _table(show_footer=True)
    table.add_column("primitive", footer="all", no_wrap=True)
    table.add_column("world")
    table.add_column("properties", footer=str(sum(row.properties for row in rows)), justify="right")
    table.add_column("examples\ntried", footer=str(sum(row.examples for row in rows)), justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_column("seconds", footer=f"{sum(row.seconds for row in rows):.1f}", justify="right")
    shown = None
    for row in rows:
        name = "" if row.primitive == shown else row.primitive
        shown = row.primitive
        table.add_row(name, row.world, str(row.properties), str(row.examples), verdict(row), f"{row.seconds:.1f}")
    return table


def failure(console: Console, record: PropertyRecord) -> None:
    """Print the full report of one failure, and the command that repeats it."""
    line(console, f"── FAILS  {record.nodeid}", style=BAD)
    line(console, record.detail)
    if record.replay:
        line(console, f"replay  {record.replay}", style="bold")
    console.print()


def packages_table(ranking: PackageRanking) -> Table:
    """Return a table of the best packages, best first."""
    table = _table()
    table.add_column("", justify="right")
    table.add_column("package", no_wrap=True)
    table.add_column("score", justify="right")
    for place, (name, score) in enumerate(ranking.top, start=1):
        table.add_row(str(place), name, f"{score:.9f}")
    return table


def agreements_table(agreements: Iterable[Agreement]) -> Table:
    """Return a table of the versions that were compared on each graph, with their differences."""
    table = _table()
    table.add_column("graph")
    table.add_column("nodes", justify="right")
    table.add_column("edges", justify="right")
    table.add_column("versions")
    table.add_column("largest\ndifference", justify="right")
    for agreement in agreements:
        known = agreement.difference is not None
        table.add_row(
            agreement.graph,
            str(agreement.num_nodes),
            str(agreement.num_edges),
            ", ".join(agreement.versions),
            Text(f"{agreement.difference:.1e}") if known else Text("FAILS", style=BAD),
        )
    return table


def replicas_table(training: ReplicaTraining) -> Table:
    """Return a table of replicas, loss, accuracy, difference of the weights, equality of the replicas, and seconds."""
    table = _table()
    columns = ("replicas", "loss", "accuracy", "largest difference\nof a weight", "replicas equal", "seconds")
    for name in columns:
        table.add_column(name, justify="right")
    for run in training.runs:
        equal = Text("bit for bit", style=GOOD) if run.bitwise_equal else Text("DIFFER", style=BAD)
        table.add_row(
            str(run.replicas),
            f"{run.loss:.4f}",
            f"{100 * run.accuracy:.1f} %",
            Text(f"{run.difference:.1e}", style="" if run.difference <= training.allowed else BAD),
            Text("only one") if run.replicas == 1 else equal,
            f"{run.seconds:.1f}",
        )
    return table


def parts_table(parts: Iterable[Part]) -> Table:
    """Return a table of the present parts, and of the ways to get the missing ones."""
    table = _table()
    table.add_column("part", no_wrap=True)
    table.add_column("here", overflow="fold")
    table.add_column("to get it", overflow="fold")
    for part in parts:
        table.add_row(part.name, Text(part.found, style=SKIPPED if part.cure else ""), Text(part.cure))
    return table


def parts_json(parts: Iterable[Part]) -> str:
    """Return the same as JSON: an object with ``parts``, each with the fields of a ``Part``."""
    fields = [
        {
            "name": part.name,
            "found": part.found,
            "missing": part.is_missing,
            "required": part.required,
            "cure": part.cure or None,
        }
        for part in parts
    ]
    return json.dumps({"parts": fields}, indent=2)


def _table(*, show_footer: bool = False) -> Table:
    lines = box.SIMPLE if show_footer else box.SIMPLE_HEAD
    return Table(box=lines, show_footer=show_footer, pad_edge=False, collapse_padding=True)
