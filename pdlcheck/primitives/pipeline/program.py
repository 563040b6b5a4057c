"""What a rank does, step by step, with the messages that follow from the grid."""

from __future__ import annotations

from dataclasses import dataclass

from pdlcheck.primitives.pipeline.cells import Cell, Schedule

__all__ = ["Turn", "consumer", "forward_only", "program"]


@dataclass(frozen=True)
class Turn:
    """One step of one rank.

    Args:
        cell: the pass to do; None is an idle step.
        sends: the rank that the pass's result goes to, if it is another one.
        receives: passes of other ranks in this step whose results come here, with the cell that reads each and the
            rank that did it.
    """

    cell: Cell | None
    sends: int | None
    receives: tuple[tuple[Cell, int], ...]


def consumer(cell: Cell, n_stages: int) -> Cell | None:
    """The cell of the next stage, forwards or backwards, that reads what ``cell`` makes."""
    stage = cell.stage + (1 if cell.kind == "F" else -1)
    return Cell(stage, cell.kind, cell.microbatch) if 0 <= stage < n_stages else None


def program(schedule: Schedule, rank: int) -> list[Turn]:
    """The turns of ``rank``.

    In each step a rank does its pass first. Then it posts, together, the send of its result and the receives of what
    others made for it in the same step. So any two ranks post the messages between them in the same order, which is
    all that a backend without tags asks for; and since a pass reads only what earlier steps made, and nobody waits
    for a send before the end, no step waits for a later one, whether sends are buffered or not.
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
    """The forward passes of ``schedule``, in their order, without the steps that are left empty."""
    rows = [[cell if cell is not None and cell.kind == "F" else None for cell in row] for row in schedule.rows]
    busy = [step for step in range(schedule.n_steps) if any(row[step] for row in rows)]
    return Schedule(f"{schedule.name}, forward", tuple(tuple(row[step] for step in busy) for row in rows))
