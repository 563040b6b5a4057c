"""The progress display of the suites: a bar on a terminal, or one plain line for each primitive elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdlcheck.report.records import Key, PropertyRecord, rows
from pdlcheck.report.tables import count, line, row_line

__all__ = ["Display", "console_on_stdout", "display"]


class Display(Protocol):
    """The display that follows a run of the suites."""

    def begin(self, counts: Mapping[Key, int]) -> None:
        """Take the number of tests for each primitive and world."""

    def running(self, key: Key) -> None:
        """Show that a test of this primitive starts in this world."""

    def done(self, record: PropertyRecord) -> None:
        """Show that a test has ended."""


@contextmanager
def console_on_stdout() -> Iterator[Console]:
    """Yield a console for this process's stdout, which also works while pytest captures the tests' output."""
    sys.stdout.flush()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding) as stream:
        # read the width now: while tests run, pytest replaces the terminal by its own files
        yield Console(file=stream, highlight=False, width=Console(file=stream).width)


@contextmanager
def display() -> Iterator[Display]:
    """Show the progress of the suites on stdout."""
    with console_on_stdout() as console:
        if not console.is_terminal:
            yield _Lines(console)
            return
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
            redirect_stdout=False,  # pytest has replaced both
            redirect_stderr=False,
        ) as progress:
            yield _Bar(progress)


class _Lines:
    """A display that prints one line when the last test of a primitive in a world has ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._left: dict[Key, int] = {}
        self._records: dict[Key, list[PropertyRecord]] = {}

    def begin(self, counts: Mapping[Key, int]) -> None:
        self._left = dict(counts)
        primitives = {name for name, _ in counts}
        tests, names = count(sum(counts.values()), "property"), count(len(primitives), "primitive")
        line(self._console, f"{tests} of {names}")

    def running(self, key: Key) -> None:
        pass

    def done(self, record: PropertyRecord) -> None:
        self._records.setdefault(record.key, []).append(record)
        self._left[record.key] = self._left.get(record.key, 1) - 1
        if self._left[record.key] == 0:
            (row,) = rows(self._records[record.key])
            line(self._console, row_line(row))


class _Bar:
    """A display with a bar over all tests and the current primitive; above it, a line for each failure."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("collecting the suites", total=None)

    def begin(self, counts: Mapping[Key, int]) -> None:
        self._progress.update(self._task, total=sum(counts.values()))

    def running(self, key: Key) -> None:
        self._progress.update(self._task, description=f"{key[0]} [dim]{key[1]}[/]")

    def done(self, record: PropertyRecord) -> None:
        self._progress.advance(self._task)
        if record.outcome == "fails":
            line(self._progress.console, f"FAILS  {record.nodeid}", style="bold red")
