"""The validation of schedules; an invalid one is shown as a grid with the wrong cells marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pdlcheck.primitives.pipeline.cells import Cell, Schedule, grid_text

__all__ = ["require_valid_schedule"]

Place = tuple[int, int]


def require_valid_schedule(schedule: Schedule, *, max_live: int | Sequence[int] | None = None) -> None:
    """Raise ValueError unless every cell occurs once, with its stage on one rank and its inputs made in earlier steps.

    A valid schedule cannot deadlock: messages are posted in the order of the steps and read in later ones.

    Args:
        schedule: the schedule to validate.
        max_live: the most activations that a rank may hold (forward passes done, backward passes not); a number for
            each rank, or one for all.

    Raises:
        ValueError: the first error, and the grid with the wrong cells between ``>`` and ``<``.

    Example:
        >>> from pdlcheck.primitives.pipeline import parse_schedule
        >>> require_valid_schedule(parse_schedule("mine", [["0F0", "0B0", None], [None, "1F0", "1B0"]]))
        Traceback (most recent call last):
            ...
        ValueError: mine: 0B0 on rank 0 in step 1 needs 1B0, which is made in step 2 on rank 1
          mine: 2 stages on 2 ranks, 1 micro-batches, 3 steps
          step     0     1     2
          rank 0  F0  >B0<     .
          rank 1   .    F0  >B0<
    """
    places = _once(schedule)
    _require_together(schedule, places)
    for cell, (rank, step) in places.items():
        for need in cell.needs(schedule.n_stages):
            other, made = places[need]
            if made >= step:
                raise _error(
                    schedule,
                    f"{cell} on rank {rank} in step {step} needs {need}, which is made in step {made} on rank {other}",
                    [(rank, step), (other, made)],
                )
    if max_live is not None:
        limits = [max_live] * schedule.n_ranks if isinstance(max_live, int) else list(max_live)
        for rank, limit in enumerate(limits):
            _require_live(schedule, rank, limit)


def _once(schedule: Schedule) -> dict[Cell, Place]:
    """Return the place of each cell. Raise ValueError unless every required cell occurs exactly once."""
    places: dict[Cell, Place] = {}
    for step, rank, cell in schedule:
        if cell in places:
            where = " and ".join(f"on rank {one} in step {at}" for one, at in (places[cell], (rank, step)))
            raise _error(schedule, f"{cell} is there twice, {where}", [places[cell], (rank, step)])
        places[cell] = rank, step
    if not places:
        raise ValueError(f"{schedule.name}: the schedule is empty")
    # Pairs come first: a mistyped number adds a micro-batch by mistake, and its other cells would be missing too.
    for cell, (rank, step) in places.items():
        other = Cell(cell.stage, "B" if cell.kind == "F" else "F", cell.microbatch)
        if other not in places:
            text = f"{other} is missing, {cell} is there on rank {rank} in step {step}"
            raise _error(schedule, text, [(rank, step)])
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.n_microbatches):
            if Cell(stage, "F", microbatch) not in places:
                raise _error(schedule, f"{Cell(stage, 'F', microbatch)} is missing", [])
    return places


def _require_together(schedule: Schedule, places: Mapping[Cell, Place]) -> None:
    """Raise ValueError if the cells of a stage are on two ranks. The rank with most of them counts as the right one."""
    homes: dict[int, Counter[int]] = {}
    for cell, (rank, _) in places.items():
        homes.setdefault(cell.stage, Counter())[rank] += 1
    for cell, (rank, step) in places.items():
        home = homes[cell.stage].most_common(1)[0][0]
        if rank != home:
            other = next(one for one in places if one.stage == cell.stage and places[one][0] == home)
            text = f"{cell} is on rank {rank} in step {step}, {other} on rank {home} in step {places[other][1]}"
            raise _error(schedule, f"{text}: one stage on two ranks", [(rank, step), places[other]])


def _require_live(schedule: Schedule, rank: int, limit: int) -> None:
    live = 0
    for step, cell in enumerate(schedule.rows[rank]):
        if cell is not None:
            live += 1 if cell.kind == "F" else -1
            if live > limit:
                text = f"{cell} in step {step} is activation number {live} that rank {rank} holds, the limit is {limit}"
                raise _error(schedule, text, [(rank, step)])


def _error(schedule: Schedule, text: str, wrong: Sequence[Place]) -> ValueError:
    grid = grid_text(schedule, wrong).replace("\n", "\n  ")
    return ValueError(f"{schedule.name}: {text}\n  {grid}")
