"""The output of ``pdlcheck pagerank``: progress while it runs, and its table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdlcheck.report.tables import line

__all__ = ["RankingProgress", "ranking_progress", "ranking_table"]

QUIET_S = 1.0  # the least time between two lines
FIRST = 10.0  # about the bound after the first round; from there to tol, every round gains about the same


class RankingProgress(Protocol):
    """The progress of the ranking of a file; each method can be passed as a callback."""

    def read(self, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` bytes have been read; ``total`` of a pipe is ``None``."""

    def build(self) -> None:
        """Show that the edges are being laid out."""

    def solve(self, rounds: int, bound: float) -> None:
        """Show that the error after ``rounds`` rounds is at most ``bound``; infinity before the first round."""


@contextmanager
def ranking_progress(console: Console, tol: float) -> Iterator[RankingProgress]:
    """Yield a progress bar if ``console`` is a terminal, else a printer of occasional lines.

    Args:
        console: the console for progress.
        tol: the error bound below which the rounds end.
    """
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[detail]}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, expand=True) as progress:
        yield _Bar(progress, tol)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._last, self._said = -math.inf, ""

    def read(self, done: int, total: int | None) -> None:
        self._say(f"read   {_bytes(done, total)}", at_once=total is not None and done >= total)

    def build(self) -> None:
        self._say("build", at_once=True)

    def solve(self, rounds: int, bound: float) -> None:
        self._say(f"solve  {_bound(rounds, bound)}", at_once=rounds == 0)

    def _say(self, text: str, *, at_once: bool) -> None:
        now = time.monotonic()
        if text != self._said and (at_once or now - self._last >= QUIET_S):
            self._last, self._said = now, text
            line(self._console, text)


class _Bar:
    def __init__(self, progress: Progress, tol: float) -> None:
        self._progress, self._tol = progress, tol
        self._task = progress.add_task("read", total=None, detail="")

    def read(self, done: int, total: int | None) -> None:
        self._progress.update(self._task, completed=done, total=total, detail=_bytes(done, total))

    def build(self) -> None:
        self._progress.update(self._task, description="build", total=None, detail="")

    def solve(self, rounds: int, bound: float) -> None:
        share = 0.0
        if math.isfinite(bound):
            share = 1.0 if bound <= self._tol else math.log(FIRST / bound) / math.log(FIRST / self._tol)
        self._progress.update(self._task, description="solve", completed=share, total=1, detail=_bound(rounds, bound))


def ranking_table(ranked: Sequence[tuple[object, float]]) -> Table:
    """Return a table of rank, node and score, best first; characters of a name that are not printable are escaped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = all(isinstance(node, int) for node, _ in ranked)
    table.add_column("rank", justify="right")
    table.add_column("node", justify="right" if numbers else "left")
    table.add_column("score", justify="right")
    for number, (node, score) in enumerate(ranked, 1):
        name = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(node))
        table.add_row(str(number), Text(name), f"{score:.6e}")
    return table


def _bytes(done: int, total: int | None) -> str:
    return f"{done / 1e6:.1f} MB" if total is None else f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"


def _bound(rounds: int, bound: float) -> str:
    return f"round {rounds}, error at most {bound:.1e}" if math.isfinite(bound) else "begins"
