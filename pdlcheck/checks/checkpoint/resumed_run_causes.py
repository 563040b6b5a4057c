"""The cause of a second run that ends elsewhere than a run without a stop: what its optimizer steps start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pdlcheck.checks.checkpoint.step_records import (
    INPUTS,
    RANDOM,
    RATES,
    STATE,
    WEIGHTS,
    StepRecord,
    digest_of,
)
from pdlcheck.checks.checkpoint.traced_runs import Apart, Traced, first_apart_in_the_end, trains_alike
from pdlcheck.checks.checkpoint.unsaved_state import STREAMS
from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain

__all__ = ["Again", "cause_of", "cause_of_steps"]

Again = Callable[..., list[Traced]]  # runs the stopped program again, with values put back, or with another seed

_TORCH = "the random numbers of torch"
_ALIKE = "put back from the run without a stop, the training ends alike"


def cause_of_steps(resumed: Traced, whole: Traced, taken: int) -> Diagnosis:
    """Return why the second run takes another number of steps than were left."""
    first = resumed.steps[0].weights if resumed.steps else {}
    again = len(resumed.steps) == len(whole.steps)
    return explain(
        None,
        [
            Candidate.when(
                "it begins anew, with the weights of the start: it does not find the checkpoint, or does not load it",
                again and first == whole.steps[0].weights,
            ),
            Candidate.when(
                "it loads the weights, and takes all steps again: the number of steps is not saved, or not loaded",
                again and first == whole.steps[taken].weights != whole.steps[0].weights,
            ),
        ],
    )


def cause_of(
    apart: Apart | None, runs: tuple[Sequence[Traced], Sequence[Traced]], taken: int, seed: int, again: Again
) -> tuple[Diagnosis, str | None]:
    """Return what was lost, found by putting it back, and the differences that show it.

    Args:
        apart: the first step that differs; None if all are equal.
        runs: the second run, and the run without a stop.
        taken: the steps before the stop.
        seed: of the run without a stop.
        again: called with ``names=`` and ``kept=``, or ``seed=``, or ``fresh=True`` for a run without a checkpoint.
    """
    resumed, whole = runs
    if apart is None:
        every = "every optimizer step is that of the run without a stop"
        return Diagnosis(fits=(f"not saved, or not loaded: {_returned(runs)}; {every}",)), None
    mine, wanted = resumed[apart.rank].steps[apart.number], whole[apart.rank].steps[taken + apart.number]
    if apart.number == 0 and WEIGHTS in apart.names:
        return _in_weights(mine, wanted, whole, apart.rank, taken, again), None
    suspects = _suspects(resumed, whole, taken)

    def heals(names: Sequence[str]) -> bool:
        try:
            return trains_alike(again(names=tuple(names), kept=[one.kept for one in whole]), whole, taken)
        except Exception:  # the program may refuse what is put back
            return False

    of_optimizer = [one for one in suspects if one not in STREAMS]
    tries = [of_optimizer, [one for one in suspects if one == _TORCH], suspects]
    tries = [names for number, names in enumerate(tries) if names and names not in tries[:number]]
    lost = next((names for names in tries if heals(names)), [])
    for suspect in list(lost):
        fewer = [other for other in lost if other != suspect]
        if fewer and heals(fewer):
            lost = fewer
    if lost:
        named = " and ".join(STATE + f" ({wanted.optimizer})" if one == STATE else one for one in lost)
        told = [f"lost: {named}; {_ALIKE}", *_details(lost, resumed, whole, taken)]
        return Diagnosis(fits=("; ".join(told),)), _evidence(lost, resumed[apart.rank], whole[apart.rank], taken)
    more = [name for name in apart.names if name not in (INPUTS, WEIGHTS)]
    hints = [f"also different in that step: {', '.join(more)}"] if more else []
    if INPUTS in apart.names:
        return _in_data(apart, mine, whole, taken, lambda: trains_alike(again(seed=seed), whole, taken), hints), None
    return Diagnosis(excluded=tuple(f"{name} alone" for name in suspects), hints=tuple(hints)), None


def _returned(runs: tuple[Sequence[Traced], Sequence[Traced]]) -> str:
    where = first_apart_in_the_end(*runs)
    return "" if where is None else where[1]


def _suspects(resumed: Sequence[Traced], whole: Sequence[Traced], taken: int) -> list[str]:
    """Return what can be put back, and differs on any rank: in the first step, or for settings in any."""
    found: dict[str, None] = {}
    for mine, wanted in zip(resumed, whole, strict=True):
        pairs = list(zip(mine.steps, wanted.steps[taken:], strict=False))
        first, goal = pairs[0]
        found |= dict.fromkeys([STATE] if first.state != goal.state else [])
        found |= dict.fromkeys([RATES] if any(one.settings != two.settings for one, two in pairs) else [])
        streams = goal.random if RANDOM in first.differing(goal) else {}
        found |= dict.fromkeys(name for name, held in streams.items() if first.random.get(name) != held)
    return list(found)


def _in_weights(
    mine: StepRecord, wanted: StepRecord, whole: Sequence[Traced], rank: int, taken: int, again: Again
) -> Diagnosis:
    wrong = [name for name, held in wanted.weights.items() if mine.weights.get(name) != held]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    what = f"{wrong[0]}{more} of rank {rank}" if wrong else "the weights"

    def are_those_of_start(_: object) -> bool:
        start = again(fresh=True)[rank].steps[0].weights
        return bool(wrong) and all(mine.weights.get(name) == start.get(name) for name in wrong)

    others: list[Candidate[StepRecord]] = [
        Candidate.when(
            f"the second run begins with what rank {other} held as {what}: each rank's own was not saved",
            bool(wrong) and all(mine.weights.get(name) == one.steps[taken].weights.get(name) for name in wrong),
        )
        for other, one in enumerate(whole)
        if other != rank
    ]
    of_start: Candidate[StepRecord] = Candidate(
        f"the second run begins with what a new model has as {what}: load does not restore it", holds=are_those_of_start
    )
    hint = f"the second run begins with other values of {what}: they are not saved as they are, or not loaded"
    note: Candidate[StepRecord] = Candidate.when(hint, True)
    return explain(mine, others, [of_start], hints=[note])


def _in_data(
    apart: Apart,
    mine: StepRecord,
    whole: Sequence[Traced],
    taken: int,
    is_right_with_seed: Callable[[], bool],
    hints: Sequence[str],
) -> Diagnosis:
    """Return why the model is given other data than without a stop."""
    step = taken + apart.number + 1
    given = [number for number, one in enumerate(whole[apart.rank].steps) if one.inputs == mine.inputs]
    where = f"in step {step}, the model is given the data of step {given[0] + 1}" if given else ""
    other = f"in step {step}, the model is given other data than in any step without a stop"
    measured: list[Candidate[StepRecord]] = [
        Candidate.when(
            f"{where}: the data begin anew, and those that were taken are not skipped",
            bool(given) and given[0] == 0 and apart.number == 0,
        ),
        Candidate.when(f"{where}: the position in the data is wrong", bool(given) and given[0] + apart.number > 0),
    ]
    tried: Candidate[StepRecord] = Candidate(
        f"{other}; started with the seed of that run, the training ends alike: the order of the data is drawn from "
        "random numbers that the program neither seeds nor saves",
        holds=lambda _: is_right_with_seed(),
    )
    notes: list[Candidate[StepRecord]] = [
        Candidate.when(other, not given),
        *(Candidate.when(hint, True) for hint in hints),
    ]
    return explain(mine, measured, [tried], hints=notes)


def _details(lost: Sequence[str], resumed: Sequence[Traced], whole: Sequence[Traced], taken: int) -> Iterator[str]:
    """Yield what is measured about lost settings, and about lost random numbers."""
    settings = [group for one in whole for group in one.steps[taken].settings]
    if RATES in lost and STATE not in lost and any("initial_lr" in group for group in settings):
        yield "a scheduler makes such settings: is its state saved, and loaded?"
    if _TORCH not in lost:
        return
    held = [one.steps[taken].random.get(_TORCH) for one in whole]
    for rank, mine in enumerate(resumed):
        found = mine.steps[0].random.get(_TORCH)
        if found != held[rank] and found in held:
            yield f"rank {rank} has those of rank {held.index(found)}: each rank's own were not saved"
            return
    ahead = _draws_ahead(resumed[0].steps[0].random.get(_TORCH), whole[0].kept.random.get(_TORCH))
    if ahead:
        yield f"they are {ahead} seed{'s' if ahead > 1 else ''} further: a DataLoader draws one when a pass begins"


def _draws_ahead(found: str | None, state: torch.Tensor | None) -> int:
    """Return how many seeds are drawn between a state of torch's random numbers and the digest of another; 0 if not."""
    if state is not None:
        drawing = torch.Generator()
        drawing.set_state(state)
        for draws in (1, 2, 3):
            torch.empty((), dtype=torch.int64).random_(generator=drawing)
            if digest_of(drawing.get_state()) == found:
                return draws
    return 0


def _evidence(lost: Sequence[str], mine: Traced, wanted: Traced, taken: int) -> str | None:
    texts = []
    for number, (one, two) in enumerate(zip(mine.steps, wanted.steps[taken:], strict=False)):
        if STATE in lost and number == 0 and one.state != two.state:
            wrong = [name for name, held in two.state.items() if one.state.get(name) != held]
            empty = all(one.state.get(name) == digest_of({}) for name in wrong)
            texts.append(f"the state of {wrong[0]} {'is empty' if empty else 'holds other values'}" if wrong else "")
        if RATES in lost and one.settings != two.settings:
            texts += _of_settings(taken + number + 1, one.settings, two.settings)
            break
    return "; ".join(text for text in texts if text) or None


def _of_settings(step: int, found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{key} is {one.get(key)!r} in step {step} instead of {value!r}"
        for one, two in zip(found, expected, strict=False)
        for key, value in two.items()
        if one.get(key) != value
    ][:1]
