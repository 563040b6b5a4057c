"""The cause of a resumed training that diverges: the lost state, found by restoring candidates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdlcheck.checks.checkpoint.data_order import why_other_data
from pdlcheck.checks.checkpoint.runs import (
    BEFORE_LOAD,
    OF_NO_FUNCTION,
    PASS,
    STEPS,
    Plan,
    Start,
    Trace,
    first_apart,
    fresh_start,
    left_by_start,
    numbers_of_torch_after_load,
    reading_of_resumed_run,
    reading_of_straight_run,
    resumed_run,
)
from pdlcheck.checks.checkpoint.unsaved_state import IN_CONTAINERS, NUMBERS, first_difference
from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.state import State, differing, digest

__all__ = ["REPLICAS", "find_cause"]

REPLICAS = (
    "; where ranks are meant to hold the same, they differed before saving: check_replicas_in_sync says since when"
)

_READINGS = (reading_of_resumed_run, reading_of_straight_run)
_OF_TORCH = "the random numbers of torch"
_ONLY_BUFFERS = (
    "; only buffers differ, parameters are alike: right only for statistics of a rank's own data, which buffers=False "
    "accepts"
)
_WITH_STEPS = "with those steps taken before loading, the training goes on exactly"
_WITH_STEPS_BEFORE = "with the steps before the stop taken before loading, the training goes on exactly"
_NOT_ALL = "nothing that is put back makes the training go on exactly"
_ONE_MORE_PASS = (
    f"{PASS}: one more begins after loading; restore them once the iterator is there, or give the loader a generator "
    "of its own"
)


def find_cause(
    start: Start, plan: Plan, world: Any, pair: tuple[list[Trace], list[Trace]], trouble: tuple[int, int, str]
) -> tuple[Diagnosis, str | None]:
    """Return the state that was lost, and the differences that show it.

    Whether a state is lost is tested: the training is resumed once more, with that state put back. The candidates are
    sets of states, the largest first.

    Args:
        start: makes the model and the functions of the training.
        plan: the steps, the file and the seed.
        world: where the ranks run.
        pair: the traces of the resumed run and of the run without a stop, one for each rank.
        trouble: the number of steps after loading, the rank and the tensor of the first difference.

    Returns:
        The cause, and the differences in words; None if there are none to show.
    """
    resumed, straight = pair
    if trouble[0] == 0:
        return _cause_in_weights(start, plan, world, pair, trouble), None
    evidence = {}
    for part in straight[0].left:
        texts = (
            first_difference(mine.left.get(part, {}), wanted.left.get(part, {}), part)
            for mine, wanted in zip(resumed, straight, strict=True)
        )
        evidence[part] = next((text for text in texts if text), None)
    suspects = [part for part, text in evidence.items() if text]

    def heals(names: list[str]) -> bool:
        left = [trace.left for trace in straight]
        try:
            found = world.run(resumed_run, start, plan, left, names, world_size=len(straight))
        except Exception:  # steps before loading may leave a state with which the program cannot go on
            return False
        return first_apart(found, straight) is None

    begun = [PASS] if resumed[0].loaders else []
    held = [part for part in suspects if not part.startswith(NUMBERS)]  # a resumed run may keep its own counts
    tries = [suspects, begun, held, *([[*suspects, *begun], [*held, *begun]] if begun else []), [*suspects, STEPS]]
    tries = [names for number, names in enumerate(tries) if names and names not in tries[:number]]
    suspects = next((names for names in tries if heals(names)), [])
    other_data = None
    with suppress(Exception):  # a program may refuse what the recording adds
        mine, wanted = (world.run(run, start, plan, world_size=len(straight)) for run in _READINGS)
        other_data = why_other_data(mine, wanted, plan.saved_after, plan.saved_after + trouble[0])
    if not suspects:
        differ = [text for part, text in evidence.items() if text and part not in OF_NO_FUNCTION]
        tried = [part for part, text in evidence.items() if text or not part.startswith(NUMBERS)]
        excluded = Diagnosis(excluded=("the weights alone", *(f"{part} alone" for part in tried)))
        found = Diagnosis(fits=(f"{other_data}; {_NOT_ALL}",)) if other_data else excluded
        return found, "; ".join([*differ, *_not_seen(resumed)]) or None
    for suspect in list(suspects):
        fewer = [other for other in suspects if other != suspect]
        if fewer and heals(fewer):
            suspects = fewer
    # These steps change every part that load does not restore, so each part that differs may be lost, except logs.
    ran = STEPS in suspects
    others = {part for part in evidence if ran and part not in OF_NO_FUNCTION and not part.startswith(IN_CONTAINERS)}
    lost = [part for part, text in evidence.items() if text and (part in suspects or part in others)]
    shown = [text for part in lost if (text := evidence[part]) and part not in OF_NO_FUNCTION]
    if ran:
        shown += _not_seen(resumed)
    told = _told(lost, ran, PASS in suspects)
    if _OF_TORCH in lost:
        told += _seeded_again(start, plan, world, straight)
    told += _of_another_rank(start, plan, world, pair, lost)
    if other_data:
        also = f"; also not restored: {' and '.join(lost)}" if lost else ""
        told = f"{other_data}; {_WITH_STEPS_BEFORE}{also}" if ran else f"{told}; resumed, {other_data}"
    return Diagnosis(fits=(told,)), "; ".join(shown) or None


def _seeded_again(start: Start, plan: Plan, world: Any, straight: Sequence[Trace]) -> str:
    """Return what load does to torch's random numbers, if the file holds the lost state; else an empty text."""
    path = Path(plan.file)
    files = [one.read_bytes() for one in [path, *path.rglob("*")] if one.is_file()]

    def is_saved(state: Tensor) -> bool:
        return any(state.numpy().tobytes() in held for held in files)

    if not all(is_saved(trace.left[_OF_TORCH]) for trace in straight):
        return ""
    after = world.run(numbers_of_torch_after_load, start, plan, world_size=len(straight))
    if any(is_saved(state) for state, _ in after):
        return ""
    seeds = [seed for state, seed in after if torch.equal(state, torch.Generator().manual_seed(seed).get_state())]
    if seeds.count(BEFORE_LOAD) == len(after):
        return "; the file holds them, load does not set them"
    if len(seeds) < len(after) or BEFORE_LOAD in seeds:
        return ""
    return (
        f"; the file holds them, but load leaves rank 0 in the state of torch.manual_seed({seeds[0]}): it seeds after "
        "restoring them, or instead"
    )


def _of_another_rank(
    start: Start, plan: Plan, world: Any, pair: tuple[list[Trace], list[Trace]], lost: Sequence[str]
) -> str:
    """Return which rank's state was loaded in place of a rank's own, if it is not the state before loading."""
    resumed, straight = ([trace.left for trace in traces] for traces in pair)
    for part in lost:
        held = [(mine.get(part), wanted.get(part)) for mine, wanted in zip(resumed, straight, strict=True)]
        ranks = [rank for rank, (found, own) in enumerate(held) if first_difference(found, own)]
        for other in range(len(held)):
            if other not in ranks and ranks and all(_is_that_of(*held[rank], held[other][1]) for rank in ranks):
                begun = world.run(left_by_start, start, plan, world_size=len(held))
                if any(not first_difference(held[rank][0], begun[rank].get(part)) for rank in ranks):
                    return ""
                on = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
                return f"; {on} got the state that rank {other} saved: each rank needs its own"
    return ""


def _is_that_of(found: Any, own: Any, other: Any) -> bool:
    """Return whether a state is that of another rank, in each part that differs from a rank's own."""
    if not first_difference(found, own):
        return True
    if all(isinstance(one, dict) and one.keys() == found.keys() for one in (found, own, other)):
        return all(_is_that_of(found[key], own[key], other[key]) for key in found)
    return first_difference(found, other) is None


def _not_seen(resumed: Sequence[Trace]) -> list[str]:
    """Return a text for each part whose state could not be read; such a part may be lost too."""
    told = {name: text for trace in reversed(resumed) for name, text in trace.unread.items()}
    return [f"{name} could not be looked at, its state_dict() raises {text}" for name, text in told.items()]


def _told(lost: list[str], ran: bool, one_more_pass: bool) -> str:
    names = " and ".join(lost)
    if one_more_pass and not lost:
        return f"{_ONE_MORE_PASS}; with that seed drawn elsewhere, the training goes on exactly"
    if one_more_pass:
        return f"lost: {names}; and {_ONE_MORE_PASS}; with both put right, the training goes on exactly"
    if not ran:
        return f"lost: {names}; put back from the run without a stop, the training goes on exactly"
    if not lost:
        return f"lost: {STEPS}; {_WITH_STEPS}"
    return (
        f"lost: {names} and {STEPS}; the training does not go on exactly with {names} alone put back from the run "
        "without a stop, it does with those steps taken before loading too"
    )


def _cause_in_weights(
    start: Start, plan: Plan, world: Any, pair: tuple[list[Trace], list[Trace]], trouble: tuple[int, int, str]
) -> Diagnosis:
    resumed, straight = pair
    _, rank, name = trouble
    kind, found = name.split()[0], {name: resumed[rank].states[0].get(name)}

    def is_held_in(state: State, found: State) -> bool:
        return not differing([digest(found), digest({name: state.get(name)})])

    def is_that_of_start(found: State) -> bool:
        return is_held_in(world.run(fresh_start, start, plan, world_size=len(straight))[rank], found)

    only_buffers = _ONLY_BUFFERS if _only_buffers_differ(resumed, straight) else REPLICAS
    return explain(
        found,
        (
            Candidate(
                f"it is what rank {other} held: each rank's own was not saved{only_buffers}",
                holds=partial(is_held_in, trace.states[0]),
            )
            for other, trace in enumerate(straight)
            if other != rank
        ),
        [Candidate(f"it is what start made: load does not restore this {kind}", holds=is_that_of_start)],
        hints=[Candidate.when(f"save does not write this {kind} as it is, or load does not", True)],
    )


def _only_buffers_differ(resumed: Sequence[Trace], straight: Sequence[Trace]) -> bool:
    """Return whether only buffers differ after loading, on every rank."""
    pairs = ([digest(mine.states[0]), digest(wanted.states[0])] for mine, wanted in zip(resumed, straight, strict=True))
    return all(name.startswith("buffer") for pair in pairs for name in differing(pair))
