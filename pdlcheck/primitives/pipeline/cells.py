"""Schedules as data: which rank runs which forward or backward pass in which step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Cell", "Schedule", "lay_out", "parse_schedule"]

_TEXT = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True)
class Cell:
    """One pass of one micro-batch through one stage; its text is ``1F3``: stage 1, forward, micro-batch 3.

    Args:
        stage: counted from 0, the stage that reads the input.
        kind: ``"F"``, forward, or ``"B"``, backward.
        microbatch: counted from 0.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def needs(self, n_stages: int) -> list[Cell]:
        """Return the cells whose results this one reads."""
        if self.kind == "F":
            return [Cell(self.stage - 1, "F", self.microbatch)] if self.stage else []
        own = Cell(self.stage, "F", self.microbatch)
        return [own] if self.stage == n_stages - 1 else [own, Cell(self.stage + 1, "B", self.microbatch)]


Row = tuple[Cell | None, ...]


@dataclass(frozen=True)
class Schedule:
    """A grid of steps x ranks. A rank goes through its row from left to right; None is an idle step.

    A step is a place in the order, not a duration: a cell may read only the results of earlier steps.

    Args:
        name: shown in pictures and messages.
        rows: one for each rank; a short one idles at the end.
        asynchronous: whether every backward pass is followed by a step of its stage's optimizer, as in PipeDream.

    Example:
        >>> from pdlcheck.primitives.pipeline import one_f_one_b
        >>> print(one_f_one_b(2, 3))
        1f1b: 2 stages on 2 ranks, 3 micro-batches, 8 steps
        step     0   1   2   3   4   5   6   7
        rank 0  F0  F1   .  B0  F2  B1   .  B2
        rank 1   .  F0  B0  F1  B1  F2  B2   .
    """

    name: str
    rows: tuple[Row, ...]
    asynchronous: bool = False

    def __post_init__(self) -> None:
        longest = max(map(len, self.rows), default=0)
        rows = tuple((*row, *[None] * (longest - len(row))) for row in self.rows)
        object.__setattr__(self, "rows", rows)

    @property
    def n_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.rows)

    @property
    def n_steps(self) -> int:
        """Return the number of steps."""
        return max(map(len, self.rows), default=0)

    @cached_property
    def n_stages(self) -> int:
        """Return the number of stages."""
        return 1 + max((cell.stage for _, _, cell in self), default=-1)

    @cached_property
    def n_microbatches(self) -> int:
        """Return the number of micro-batches."""
        return 1 + max((cell.microbatch for _, _, cell in self), default=-1)

    @cached_property
    def stage_ranks(self) -> tuple[int, ...]:
        """Return the rank of each stage."""
        places: dict[int, int] = {}
        for _, rank, cell in self:
            places.setdefault(cell.stage, rank)
        return tuple(places.get(stage, -1) for stage in range(self.n_stages))

    def __iter__(self) -> Iterator[tuple[int, int, Cell]]:
        """Yield step, rank and cell, step by step."""
        for step in range(self.n_steps):
            for rank, row in enumerate(self.rows):
                if (cell := row[step]) is not None:
                    yield step, rank, cell

    def __str__(self) -> str:
        return grid_text(self)

    def peak_live(self, rank: int) -> int:
        """Return the largest number of micro-batches that ``rank`` has run forward but not yet backward."""
        live = peak = 0
        for cell in self.rows[rank]:
            if cell is not None:
                live += 1 if cell.kind == "F" else -1
                peak = max(peak, live)
        return peak


def grid_text(schedule: Schedule, wrong: Iterable[tuple[int, int]] = ()) -> str:
    """Return the grid as lines of text; cells at ``(rank, step)`` of ``wrong`` are marked with ``>`` and ``<``."""
    marks = set(wrong)
    several = any(len({cell.stage for cell in row if cell}) > 1 for row in schedule.rows)
    single = not several and schedule.stage_ranks == tuple(range(schedule.n_ranks))

    def show(rank: int, step: int) -> str:
        cell = schedule.rows[rank][step]
        text = "." if cell is None else str(cell)[len(str(cell.stage)) :] if single else str(cell)
        return f">{text}<" if (rank, step) in marks else text

    table = [["step", *map(str, range(schedule.n_steps))]]
    for rank in range(schedule.n_ranks):
        table.append([f"rank {rank}", *(show(rank, step) for step in range(schedule.n_steps))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in table
    ]
    head = (
        f"{schedule.name}: {schedule.n_stages} stages on {schedule.n_ranks} ranks, "
        f"{schedule.n_microbatches} micro-batches, {schedule.n_steps} steps"
    )
    return "\n".join([head, *(line.rstrip() for line in lines)])


def lay_out(name: str, orders: Sequence[Sequence[Cell]], *, asynchronous: bool = False) -> Schedule:
    """Return a schedule with each rank's cells, in their order, in the earliest steps in which their inputs exist.

    Args:
        name: the name of the schedule.
        orders: the cells of each rank.
        asynchronous: as in :class:`Schedule`.

    Raises:
        ValueError: ranks wait for each other forever, or for a cell that no rank has; the text names
            the waiting ranks and the missing cells.

    Example:
        >>> print(lay_out("my own", [[Cell(0, "F", 0), Cell(0, "B", 0)], [Cell(1, "F", 0), Cell(1, "B", 0)]]))
        my own: 2 stages on 2 ranks, 1 micro-batches, 4 steps
        step     0   1   2   3
        rank 0  F0   .   .  B0
        rank 1   .  F0  B0   .
    """
    n_stages = 1 + max((cell.stage for order in orders for cell in order), default=-1)
    rows: list[list[Cell | None]] = [[] for _ in orders]
    made: dict[Cell, int] = {}
    places = [0] * len(orders)
    step = 0
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        ready = [
            rank
            for rank, order in enumerate(orders)
            if places[rank] < len(order)
            and all(made.get(need, step) < step for need in order[places[rank]].needs(n_stages))
        ]
        if not ready:
            raise ValueError(_stuck(name, orders, places, made, n_stages))
        for rank in range(len(orders)):
            rows[rank].append(orders[rank][places[rank]] if rank in ready else None)
        for rank in ready:
            made.setdefault(orders[rank][places[rank]], step)
            places[rank] += 1
        step += 1
    return Schedule(name, tuple(tuple(row) for row in rows), asynchronous)


def parse_schedule(
    name: str, rows: Sequence[Sequence[str | None]] | Mapping[int, Sequence[object]], *, asynchronous: bool = False
) -> Schedule:
    """Return a schedule from texts such as ``"1F3"``; None, an empty text or ``"."`` is an idle step.

    The printed ``pipeline_order`` of torch's own schedules can be parsed too.

    Example:
        >>> parse_schedule("one rank", [["0F0", "0B0"]]).n_steps
        2
    """
    chosen = [rows[rank] for rank in sorted(rows)] if isinstance(rows, Mapping) else rows
    return Schedule(name, tuple(tuple(_parse(text) for text in row) for row in chosen), asynchronous)


def _parse(text: object) -> Cell | None:
    if text is None or str(text).strip() in ("", "."):
        return None
    found = _TEXT.fullmatch(str(text).strip())
    if not found:
        raise ValueError(f"parse_schedule reads cells such as 1F3 (stage, F or B, micro-batch), got {text!r}")
    return Cell(int(found[1]), found[2], int(found[3]))


def _stuck(
    name: str, orders: Sequence[Sequence[Cell]], places: Sequence[int], made: Mapping[Cell, int], n_stages: int
) -> str:
    owners = {cell: rank for rank, order in enumerate(orders) for cell in order}
    lines = [f"{name} cannot be laid out: its ranks wait for ever"]
    for rank, order in enumerate(orders):
        if places[rank] < len(order):
            cell = order[places[rank]]
            missing = next(need for need in cell.needs(n_stages) if need not in made)
            owner = f"rank {owners[missing]}" if missing in owners else "no rank has it"
            lines.append(f"  rank {rank}: {cell} waits for {missing} ({owner})")
    return "\n".join(lines)
