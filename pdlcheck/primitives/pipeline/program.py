"""The program of one rank: its passes, step by step, with the messages that follow from the grid."""

from __future__ import annotations

from dataclasses import dataclass

from pdlcheck.primitives.pipeline.cells import Cell, Schedule

__all__ = ["Turn", "consumer", "forward_only", "program"]


@dataclass(frozen=True)
class Turn:
    """One step of one rank.

    Args:
        cell: the pass to run; None is an idle step.
        sends: the rank that gets the pass's result, if it is another one.
        receives: passes of other ranks in this step whose results this rank gets: the cell that reads each, and the
            rank that ran it.
    """

    cell: Cell | None
    sends: int | None
    receives: tuple[tuple[Cell, int], ...]


def consumer(cell: Cell, n_stages: int) -> Cell | None:
    """Return the cell of the next stage, forward or backward, that reads the result of ``cell``."""
    stage = cell.stage + (1 if cell.kind == "F" else -1)
    return Cell(stage, cell.kind, cell.microbatch) if 0 <= stage < n_stages else None


def program(schedule: Schedule, rank: int) -> list[Turn]:
    """Return the turns of ``rank``.

    In each step a rank runs its pass first. Then it posts, together, the send of its result and the receives of the
    results that others made for it in the same step. So any two ranks post the messages between them in the same order;
    a backend without tags needs no more. No step waits for a later one, whether sends are buffered or not. The reasons:
    a pass reads only results of earlier steps, and no rank waits for a send before the end.
    """
    n_stages, places = schedule.n_stages, schedule.stage_ranks
    turns = []
    for step in range(schedule.n_steps):
        own: Cell | None = None
        sends: int | None = None
        receives: list[tuple[Cell, int]] = []
        for other, row in enumerate(schedule.rows):
            cell = row[step]
            if cell is None:
                continue
            reader = consumer(cell, n_stages)
            target = None if reader is None else places[reader.stage]
            if other == rank:
                own = cell
                sends = target if target != rank else None
            elif target == rank and reader is not None:
                receives.append((reader, other))
        if own is not None or receives:
            turns.append(Turn(own, sends, tuple(receives)))
    return turns


def forward_only(schedule: Schedule) -> Schedule:
    """Return the forward passes of ``schedule``, in their order, without empty steps."""
    rows = [[cell if cell is not None and cell.kind == "F" else None for cell in row] for row in schedule.rows]
    busy = [step for step in range(schedule.n_steps) if any(row[step] for row in rows)]
    return Schedule(f"{schedule.name}, forward", tuple(tuple(row[step] for step in busy) for row in rows))
