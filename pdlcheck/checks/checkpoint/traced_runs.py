"""The runs of a program that owns its loop: their optimizer steps, what they return, and where two of them differ."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.checkpoint.step_records import RANDOM, WEIGHTS, Kept, Recorder, StepRecord, recording
from pdlcheck.checks.checkpoint.unsaved_state import STREAMS, first_difference, seed_streams, states_of
from pdlcheck.checks.state import State, differing, digest, state_of

__all__ = ["Apart", "Run", "Traced", "first_apart_in_steps", "first_apart_in_the_end", "traced_run", "trains_alike"]

Run = Callable[[Path, int | None], Mapping[str, Any]]


@dataclass(frozen=True)
class Traced:
    """One run on one rank: its optimizer steps, the values to put back, and the states of what it returned."""

    steps: list[StepRecord]
    kept: Kept
    models: dict[str, State]
    others: dict[str, Any]


class Apart(NamedTuple):
    """The first optimizer step that differs from that of the run without a stop.

    Args:
        number: of the step in the second run, from 0.
        rank: the first that differs.
        names: what differs. Random numbers alone do not count, because a program may draw none.
    """

    number: int
    rank: int
    names: list[str]


def traced_run(
    run: Run, folder: Path, stop_after: int | None, seed: int, recorder: Recorder, kept: Sequence[Kept] = ()
) -> Traced:
    """Run the program on this rank.

    Args:
        run: the program.
        folder: of its checkpoints.
        stop_after: the number of steps after which it stops; None to go on to its end.
        seed: rank r draws from ``seed + r``.
        recorder: says which values to keep, or to put back.
        kept: the values to put back, for each rank.
    """
    rank = dist.get_rank()
    seed_streams(seed + rank)
    own = replace(recorder, kept=kept[rank] if kept else Kept(), steps=[])
    with recording(own):
        returned = run(folder, stop_after)
        if not isinstance(returned, Mapping):
            raise TypeError(f"run must return a dict of what must be equal, it returned a {type(returned).__name__}")
        models = {name: one for name, one in returned.items() if isinstance(one, nn.Module)}
        own.name_parameters(models)
    states = {name: state_of(model) for name, model in models.items()}
    others = {name: _state(name, one) for name, one in returned.items() if name not in models}
    return Traced(own.steps, own.kept if own.keep_from is not None else Kept(), states, others)


def first_apart_in_steps(found: Sequence[Traced], whole: Sequence[Traced], taken: int) -> Apart | None:
    """Return the first step in which the run differs from the run without a stop, from step ``taken`` on."""
    for number in range(len(found[0].steps)):
        for rank, (mine, wanted) in enumerate(zip(found, whole, strict=True)):
            if number < len(mine.steps) and taken + number < len(wanted.steps):
                names = mine.steps[number].differing(wanted.steps[taken + number])
                if set(names) - {RANDOM}:
                    return Apart(number, rank, names)
    return None


def trains_alike(found: Sequence[Traced], whole: Sequence[Traced], taken: int) -> bool:
    """Return whether all weights are those of the run without a stop, before each step and at the end."""
    for mine, wanted in zip(found, whole, strict=True):
        pairs = list(zip(mine.steps, wanted.steps[taken:], strict=False))
        if any(WEIGHTS in one.differing(two) for one, two in pairs):
            return False
        if any(differing([digest(mine.models.get(name, {})), digest(one)]) for name, one in wanted.models.items()):
            return False
    return True


def first_apart_in_the_end(found: Sequence[Traced], whole: Sequence[Traced]) -> tuple[int, str, str] | None:
    """Return the rank, the name of what ``run`` returned, and the tensor or the difference; None if all is equal."""
    for rank, (mine, wanted) in enumerate(zip(found, whole, strict=True)):
        for name, state in wanted.models.items():
            names = differing([digest(mine.models.get(name, {})), digest(state)])
            if names:
                return rank, name, names[0]
        for name, state in wanted.others.items():
            text = first_difference(*_ends(mine.others.get(name), state), name)
            if text:
                return rank, name, text
    return None


def _ends(found: Any, expected: Any) -> tuple[Any, Any]:
    """Return two states to compare; of a longer list, such as losses, the end."""
    if isinstance(found, list) and isinstance(expected, list) and 0 < len(found) < len(expected):
        return found, expected[-len(found) :]
    return found, expected


def _state(name: str, held: Any) -> Any:
    if isinstance(held, list | tuple):
        return [one.item() if isinstance(one, Tensor) and one.numel() == 1 else _state(name, one) for one in held]
    states = {key: state for key, state in states_of({name: held}).items() if key not in STREAMS}
    if name in states:
        return states[name]
    try:
        return pickle.loads(pickle.dumps(held))
    except Exception as error:
        raise TypeError(
            f"run returned as {name!r} a {type(held).__name__}, which has no state_dict and cannot be pickled"
        ) from error
