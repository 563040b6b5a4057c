"""The faults of a schedule that need no execution: missing passes, repeated passes, and passes on another rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from pdlcheck.checks.pipeline.schedule_grid import Action, Grid, Place

__all__ = ["Fault", "faults_of"]

SHOWN = 3


@dataclass(frozen=True)
class Fault:
    """A description of a fault, and the cells that show it."""

    text: str
    places: Sequence[Place]


def faults_of(grid: Grid) -> list[Fault]:
    """Return the faults of a grid.

    Every pass must occur once, whole or in halves, and every stage must be on one rank.
    """
    n_stages, n_microbatches = _size_of(grid)
    return [
        *_twice(grid),
        *_outside(grid, n_stages, n_microbatches),
        *_backward_twice(grid),
        *_missing(grid, n_stages, n_microbatches),
        *_away(grid),
    ]


def _size_of(grid: Grid) -> tuple[int, int]:
    """Return the number of stages and micro-batches, from the largest ones that the cells name.

    A stage or micro-batch with at most a quarter of its passes does not count. A mistyped number must not define the
    size of the schedule.
    """
    passes = {(action.stage, action.microbatch, action.kind == "F") for action in grid.places if not action.is_message}
    stages, microbatches = {action.stage for action in grid.places}, {action.microbatch for action in grid.places}
    of_stage, of_microbatch = Counter(one for one, _, _ in passes), Counter(one for _, one, _ in passes)
    known = [stage for stage in stages if 2 * of_stage[stage] > len(microbatches)]
    often = [microbatch for microbatch in microbatches if 2 * of_microbatch[microbatch] > len(stages)]
    return 1 + max(known or stages), 1 + max(often or microbatches)


def _twice(grid: Grid) -> Iterator[Fault]:
    for action, places in grid.places.items():
        if len(places) > 1:
            times = "twice" if len(places) == 2 else f"{len(places)} times"
            where = ", ".join(f"on rank {rank} in step {step}" for rank, step in places)
            yield Fault(f"{action} is done {times}: {where}", places)


def _outside(grid: Grid, n_stages: int, n_microbatches: int) -> Iterator[Fault]:
    """Yield cells whose stage or micro-batch is outside the schedule, and messages to a stage that does not exist."""
    for action, places in grid.places.items():
        who, partner = _does(action, places[0]), action.partner
        if action.stage >= n_stages:
            yield Fault(f"{who}, the rest has stages 0 to {n_stages - 1}", places)
        elif action.microbatch >= n_microbatches:
            yield Fault(f"{who}, the rest has micro-batches 0 to {n_microbatches - 1}", places)
        elif partner and not 0 <= partner.stage < n_stages:
            yield Fault(f"{who}, a message to nowhere: there are stages 0 to {n_stages - 1}", places)


def _backward_twice(grid: Grid) -> Iterator[Fault]:
    for action, places in grid.places.items():
        halves = [half for half in _halves(action) if half in grid.places]
        if action.kind == "B" and halves:
            again = " and ".join(_does(half, grid.places[half][0]) for half in halves)
            marked = [place for one in (action, *halves) for place in grid.places[one]]
            yield Fault(f"{_does(action, places[0])}, the whole backward pass, and {again}, a part of it", marked)


def _missing(grid: Grid, n_stages: int, n_microbatches: int) -> Iterator[Fault]:
    """Yield the missing passes. Those of a stage and micro-batch with another pass come first."""
    begun = {(one.stage, one.microbatch) for one in grid.places if not one.is_message}
    pairs = ((stage, microbatch) for stage in range(n_stages) for microbatch in range(n_microbatches))
    inside = sorted((stage, one) for stage, one in begun if stage < n_stages and one < n_microbatches)
    in_order = chain(inside, (pair for pair in pairs if pair not in begun))
    missing = list(islice((one for pair in in_order for one in _missing_of(grid, *pair)), SHOWN + 1))
    if missing:
        near = {(one.stage, one.microbatch) for one in missing[:SHOWN]}
        marked = [at for one, at in grid if not one.is_message and (one.stage, one.microbatch) in near]
        text = ", ".join(_lacks(grid, one) for one in missing[:SHOWN])
        yield Fault(f"{text}{' and more' if missing[SHOWN:] else ''} {'are' if missing[1:] else 'is'} missing", marked)


def _lacks(grid: Grid, action: Action) -> str:
    """Describe a missing action.

    The text adds the place of another pass of the same stage and micro-batch, preferably the other half.
    """
    what = f"{action} or both halves" if action.kind == "B" and "W" in grid.kinds else str(action)
    home = grid.homes[action.stage][0][0] if action.stage in grid.homes else None
    for kind in "IWBF":
        other = Action(action.stage, kind, action.microbatch)
        if other in grid.places:
            rank, step = grid.places[other][0]
            return f"{what} on rank {home} ({other} is{'' if rank == home else f' on rank {rank}'} in step {step})"
    return what if home is None else f"{what} on rank {home}"


def _missing_of(grid: Grid, stage: int, microbatch: int) -> list[Action]:
    forward, whole = (Action(stage, kind, microbatch) for kind in "FB")
    halves = _halves(whole)
    needed = [forward]
    if whole not in grid.places:
        is_begun = any(half in grid.places for half in halves)
        in_halves = is_begun or ("W" in grid.kinds and "B" not in grid.kinds)
        # Stage 0 may have W alone, because the input of the model needs no gradient.
        needed += halves[0 if stage else 1 :] if in_halves else [whole]
    return [action for action in needed if action not in grid.places]


def _away(grid: Grid) -> Iterator[Fault]:
    """Yield passes that are not on their stage's rank.

    A stage belongs to the rank with most of its passes. If two ranks have the same number, either may be wrong.
    """
    away: dict[int, list[tuple[Action, Place]]] = {}
    for action, place in grid:
        if action.stage in grid.homes and place[0] != grid.homes[action.stage][0][0]:
            away.setdefault(action.stage, []).append((action, place))
    for stage, found in away.items():
        (home, most), *others = grid.homes[stage]
        text = f"stage {stage} is on rank {home}, but "
        if others and others[0][1] == most:
            text = f"stage {stage} is on ranks {home} and {others[0][0]}: "
            at_home = next((one, place) for one, place in grid if one.stage == stage and place[0] == home)
            found = [at_home, *(one for one in found if one[1][0] == others[0][0])][:2]
        more = " and more" if found[SHOWN:] else ""
        yield Fault(text + ", ".join(_does(*one) for one in found[:SHOWN]) + more, [place for _, place in found])


def _halves(action: Action) -> list[Action]:
    return [Action(action.stage, kind, action.microbatch) for kind in "IW"]


def _does(action: Action, place: Place) -> str:
    rank, step = place
    return f"rank {rank} does {action} in step {step}"
