"""The table of one graph, and the verdicts on the targets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from peers.table import Figure
from rich.console import Console
from rich.table import Table

from ranking.rounds import Row

__all__ = ["console", "print_table", "print_targets", "targets"]

Judged = list[tuple[str, str, bool | None]]  # target, measured value, held
TWICE = ("uni", "rmat")  # graphs on which ours must be at least twice as fast at the same true error


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_table(facts: dict[str, Any], rows: Sequence[Row], errors: Sequence[float], loads: Sequence[float]) -> None:
    """Print one line for each peer; the first row is ours."""
    words = (
        f"{facts['graph']}: {facts['num_nodes']} nodes, {facts['num_edges']} edges, {facts['dangling']} dangling; "
        f"true errors are known to {facts['reference_error_bound']:.0e}; "
        f"load before the rounds {', '.join(f'{load:.1f}' for load in loads)}"
    )
    table = Table(title=words, title_justify="left")
    table.add_column("solver", no_wrap=True)
    table.add_column("build, s", justify="right")
    for error in errors:
        for head in (f"{error:.0e}: ms (spread)", "ratio", "with build", "true error", "at"):
            table.add_column(head, justify="right")
    table.add_column("MB", justify="right")
    table.add_column("B/edge", justify="right")
    for row in rows:
        if row.why:
            table.add_row(row.peer, row.why, style="red")
            continue
        cells = [part for error in errors for part in _cells(row, rows[0], error)]
        memory = [f"{row.nbytes / 1e6:.0f}", f"{row.nbytes / max(facts['num_edges'], 1):.0f}"]
        wrong = not any(row.solved(error) for error in errors)
        table.add_row(row.peer, f"{median(row.build_s):.2f}", *cells, *memory, style="red" if wrong else None)
    console().print(table)


def _cells(row: Row, ours: Row, error: float) -> list[str]:
    tuned = row.tuned[error]
    if not row.solved(error):
        reached = "" if tuned.error is None else f"{tuned.error:.1e}"
        return ["WRONG" if tuned.why == "never" else tuned.why, "", "", reached, ""]
    setting = "-" if tuned.setting is None else str(tuned.setting)
    if isinstance(tuned.setting, float):
        setting = f"{tuned.setting:.0e}"
    ratios = ["", ""]
    if ours.solved(error):
        ratios = [f"{ratio(row, ours, error):.2f}", f"{row.total_ms(error) / ours.total_ms(error):.2f}"]
    return [str(Figure(row.solve_ms[error])), *ratios, f"{tuned.error:.1e}", setting]


def ratio(row: Row, ours: Row, error: float) -> float:
    """Return the median of the rounds' ratios of solve times, because both sides of one round had the same machine."""
    pairs = zip(row.solve_ms[error], ours.solve_ms[error], strict=False)
    return median(theirs / mine for theirs, mine in pairs)


def targets(graph: str, rows: Sequence[Row], errors: Sequence[float]) -> Judged:
    """Return the verdicts: ahead of the best peer in solve, and in build and solve.

    On some graphs the factor must be two where both sides are tuned to the error. A peer has no bound to keep: its
    tolerance is the loosest one with this true error, which can only be found if the ranks are known. Ours is
    ``tol=error``, and so the true error is far smaller; the second row has ours tuned like a peer.
    """
    ours, tuned, others = rows[0], rows[1], [row for row in rows[1:] if not row.peer.startswith("pdlcheck")]
    found: Judged = []
    for error in errors:
        reached = [row for row in others if row.solved(error)]
        told = f"{graph} {error:.0e}"
        if not reached or not ours.solved(error):
            held = None if ours.solved(error) else False
            found.append((f"{told}: solve", "no peer reaches the error" if ours.solved(error) else "we do not", held))
            continue
        best = min(reached, key=lambda row: ratio(row, ours, error))
        times = ratio(best, ours, error)
        found.append((f"{told}: solve, best peer / ours >= 1", f"{times:.2f} ({best.peer})", times >= 1))
        if graph in TWICE and tuned.solved(error):
            best = min(reached, key=lambda row: ratio(row, tuned, error))
            times = ratio(best, tuned, error)
            found.append(
                (f"{told}: solve, best peer / ours, both tuned >= 2", f"{times:.2f} ({best.peer})", times >= 2)
            )
        best = min(reached, key=lambda row: row.total_ms(error))
        times = best.total_ms(error) / ours.total_ms(error)
        found.append((f"{told}: build + solve, best peer / ours >= 1", f"{times:.2f} ({best.peer})", times >= 1))
    return found


def print_targets(found: Judged) -> None:
    table = Table(title="targets", title_justify="left")
    for head in ("target", "measured", "verdict"):
        table.add_column(head)
    for promise, measured, held in found:
        table.add_row(promise, measured, "-" if held is None else "held" if held else "NOT HELD")
    console().print(table)
