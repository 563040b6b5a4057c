"""A schedule as one self-contained SVG: a lane for each rank, time from left to right, a box for each pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from pdlcheck.primitives.pipeline.cells import Cell, Schedule

__all__ = ["save_schedule"]

_LEFT, _TOP, _LANE, _BOTTOM = 70, 44, 34, 30
_COLOURS = {"F": ("#4e79a7", "#7ea3c8", "#a9c3dd", "#cfdeed"), "B": ("#4f9d52", "#7dbb80", "#a8d3aa", "#d0e8d1")}


def save_schedule(schedule: Schedule, path: str | Path, *, forward: float = 1.0, backward: float = 2.0) -> Path:
    """Write a picture of ``schedule``: forward passes blue, backward passes green, paler for later stages of a rank.

    Each pass begins as soon as its rank is free and its inputs exist; messages take no time.

    Args:
        schedule: a valid one.
        path: ends in ``.svg``.
        forward: the duration of a forward pass, in the same unit as ``backward``.
        backward: the duration of a backward pass.

    Returns:
        ``path``.

    Raises:
        ValueError: another suffix.

    Example:
        >>> from pdlcheck.primitives.pipeline import one_f_one_b
        >>> folder = getfixture("tmp_path")
        >>> save_schedule(one_f_one_b(2, 4), folder / "1f1b.svg").name
        '1f1b.svg'
    """
    path = Path(path)
    if path.suffix != ".svg":
        raise ValueError(f"save_schedule writes .svg, got {path.name!r}")
    path.write_text("\n".join(_draw(schedule, forward, backward)) + "\n")
    return path


def times(schedule: Schedule, forward: float, backward: float) -> dict[Cell, tuple[int, float, float]]:
    """Return rank, start and end of every pass."""
    found: dict[Cell, tuple[int, float, float]] = {}
    free = [0.0] * schedule.n_ranks
    for _, rank, cell in schedule:
        start = max([free[rank], *(found[need][2] for need in cell.needs(schedule.n_stages))])
        free[rank] = start + (forward if cell.kind == "F" else backward)
        found[cell] = rank, start, free[rank]
    return found


def _draw(schedule: Schedule, forward: float, backward: float) -> Iterator[str]:
    found = times(schedule, forward, backward)
    end = max((stop for _, _, stop in found.values()), default=1.0)
    busy = sum(stop - start for _, start, stop in found.values())
    scale = min(34.0, 1200 / end)
    width, height = _LEFT + end * scale + 20, _TOP + _LANE * schedule.n_ranks + _BOTTOM
    title = (
        f"{schedule.name}: {schedule.n_stages} stages, {schedule.n_microbatches} micro-batches, "
        f"bubble {1 - busy / (end * schedule.n_ranks):.1%}"
    )
    yield (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='{height}' "
        f"viewBox='0 0 {width:g} {height}' font-family='Helvetica,Arial,sans-serif' font-size='11'>"
    )
    yield f"<rect width='{width:g}' height='{height}' fill='#ffffff'/>"
    yield f"<text x='{_LEFT}' y='24' font-size='14' font-weight='bold' fill='#222'>{escape(title)}</text>"
    for rank in range(schedule.n_ranks):
        y = _TOP + rank * _LANE
        yield f"<text x='{_LEFT - 8}' y='{y + _LANE / 2 + 4:g}' text-anchor='end' fill='#222'>rank {rank}</text>"
        yield f"<rect x='{_LEFT}' y='{y + 2}' width='{end * scale:.2f}' height='{_LANE - 4}' fill='#f1f1f1'/>"
    for cell, (rank, start, stop) in found.items():
        x, y, wide = _LEFT + start * scale, _TOP + rank * _LANE + 2, (stop - start) * scale
        shades = _COLOURS[cell.kind]
        fill = shades[min(cell.stage // schedule.n_ranks, len(shades) - 1)]
        label = str(cell.microbatch) if wide > 12 else ""
        yield (
            f"<g><title>{cell}: stage {cell.stage}, {'forward' if cell.kind == 'F' else 'backward'}, micro-batch "
            f"{cell.microbatch}</title><rect class='{cell.kind}' x='{x:.2f}' y='{y}' width='{wide:.2f}' "
            f"height='{_LANE - 4}' fill='{fill}' stroke='#ffffff'/><text x='{x + wide / 2:.2f}' "
            f"y='{y + _LANE / 2 + 2:g}' text-anchor='middle' fill='#ffffff'>{label}</text></g>"
        )
    yield "</svg>"
