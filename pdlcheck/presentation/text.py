"""The report as Markdown, and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdlcheck.bench.experiments import Plot, Point
from pdlcheck.comparison.tables import markdown_table
from pdlcheck.presentation.document import Block, Chart, Document, Failure, Finding, Grid, Picture, Tone, Words
from pdlcheck.report.tables import BAD, GOOD, SKIPPED, heading, line, print_whole

__all__ = ["as_markdown", "plot_table", "print_document"]

_STYLES: dict[Tone, str] = {"": "", "good": GOOD, "bad": BAD, "doubtful": SKIPPED}


def as_markdown(document: Document) -> str:
    """Return the report as Markdown; long parts are folded."""
    parts = [f"# {document.title}", *(_words(one) for one in document.summary)]
    for section in document.sections:
        parts += [f"## {section.title}", *(part for block in section.blocks for part in _markdown(block))]
    return "\n\n".join(parts) + "\n"


def print_document(console: Console, document: Document) -> None:
    """Print the report; tables are not wrapped."""
    line(console, document.title, style="bold")
    for one in document.summary:
        line(console, one.text, style=_STYLES[one.tone])
    for section in document.sections:
        heading(console, section.title)
        for block in section.blocks:
            _print(console, block)


def plot_table(plot: Plot) -> tuple[list[str], list[list[str]]]:
    """Return the values of a plot as a table: titles and lines.

    The values of the plot's lines are in columns beside the points.
    """
    lines = {name: dict(line) for name, line in plot.lines.items()}
    shown = [name for name, line in lines.items() if any(one.x in line for one in _points(plot))]
    rows = []
    for name, series in plot.points.items():
        for one in series:
            beside = [f"{lines[model][one.x]:.4g}" if one.x in lines[model] else "" for model in shown]
            x = one.x if isinstance(one.x, str) else f"{one.x:g}"
            spread = f"{one.low:.4g} .. {one.high:.4g}"
            rows.append([name, x, f"{one.y:.4g}", spread, *beside, *(f"{y:.4g}" for y in plot.levels.values())])
    return ["series", plot.x or "function", plot.y, "95 %", *shown, *plot.levels], rows


def _points(plot: Plot) -> Iterator[Point]:
    for series in plot.points.values():
        yield from series


def _words(words: Words) -> str:
    return f"**{words.text}**" if words.tone == "bad" else words.text


def _markdown(block: Block) -> Iterator[str]:
    match block:
        case Words():
            yield _words(block)
        case Finding():
            verdict = f" ({block.verdict})" if block.verdict else ""
            yield f"### {block.title}{verdict}"
            yield block.sentence
            if block.plot is not None:
                yield _folded("measured values", markdown_table(*plot_table(block.plot)))
        case Chart():
            yield _folded(block.title, markdown_table(*plot_table(block.plot)))
        case Grid():
            table = markdown_table(block.columns, [[cell.text for cell in row.cells] for row in block.lines])
            yield _folded(f"{block.title}: {len(block.lines)} lines", table) if len(block.lines) > 20 else table
        case Picture():
            yield block.words
        case Failure():
            yield f"### FAILS {block.title}"
            yield f"~~~~\n{block.report}\n~~~~"
            if block.replay:
                yield f"Run it again: `{block.replay}`"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _print(console: Console, block: Block) -> None:
    match block:
        case Words():
            line(console, block.text, style=_STYLES[block.tone])
        case Finding():
            console.print()
            line(console, block.title + (f": {block.verdict}" if block.verdict else ""), style=_STYLES[block.tone])
            line(console, block.sentence)
        case Chart():
            _table(console, *plot_table(block.plot))
        case Grid():
            _table(console, block.columns, [[cell.text for cell in row.cells] for row in block.lines])
        case Picture():
            line(console, block.words)
        case Failure():
            line(console, f"FAILS  {block.title}", style=BAD)
            line(console, block.report)
            if block.replay:
                line(console, f"replay  {block.replay}", style="bold")


def _table(console: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    print_whole(console, table)
