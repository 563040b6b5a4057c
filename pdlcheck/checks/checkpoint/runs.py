"""The trainings that ``check_resume`` compares: without a stop, saved, and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from pdlcheck.checks.checkpoint.lost import (
    STREAMS,
    Gradients,
    first_pass_draws_elsewhere,
    loaders_that_draw,
    numbers_of,
    parts_of,
    put_back,
    seed_streams,
    states_of,
)
from pdlcheck.checks.message import made_by_start
from pdlcheck.checks.state import State, differing, digest, state_of

__all__ = [
    "OF_NO_FUNCTION",
    "PASS",
    "STEPS",
    "Plan",
    "Start",
    "Trace",
    "first_apart",
    "fresh_start",
    "resumed_run",
    "run_to_save",
    "straight_run",
]

Start = Callable[[], tuple[nn.Module, Callable[[int], object], Callable[[Path], object], Callable[[Path], object]]]

PASS = "the seed that a DataLoader draws from the random numbers of torch when a pass begins"
STEPS = "what the steps before leave behind, such as the position in an iterator over the data"

_MADE = ("model", "step", "save", "load")
_GRADIENTS = "the gradients of the model"
OF_NO_FUNCTION = {*STREAMS, _GRADIENTS}


@dataclass(frozen=True)
class Plan:
    """Steps before saving, steps in all, where the file is, whether buffers are compared, and the seed."""

    saved_after: int
    steps: int
    file: str
    buffers: bool
    seed: int


@dataclass(frozen=True)
class Trace:
    """What a rank held after saving or loading and after each further step.

    All else that has a state is in ``left`` after saving or loading, and in ``end`` after the last step. ``loaders``:
    how many draw seeds from the random numbers of torch.
    """

    states: list[State]
    left: dict[str, Any]
    end: dict[str, Any]
    loaders: int = 0


def straight_run(start: Start, plan: Plan, saves: bool) -> Trace:
    """On this rank: the training without a stop; with ``saves``, saved on its way."""
    seed_streams(plan.seed + dist.get_rank())
    model, step, save, load = made_by_start(start(), *_MADE)
    for i in range(plan.saved_after):
        step(i)
    if saves:
        save(Path(plan.file))
    left = states_of(_parts(model, step, save, load))
    return Trace(_go_on(model, step, plan), left, states_of(_parts(model, step, save, load), buffers=plan.buffers))


def run_to_save(start: Start, plan: Plan, folder: Path) -> None:
    """On this rank: the steps before saving, then saving into ``folder``."""
    seed_streams(plan.seed + dist.get_rank())
    _, step, save, _ = made_by_start(start(), *_MADE)
    for i in range(plan.saved_after):
        step(i)
    save(folder / Path(plan.file).name)


def resumed_run(start: Start, plan: Plan, straight: list[dict[str, Any]] | None, names: list[str]) -> Trace:
    """On this rank: the training resumed from the plan's file.

    Args:
        straight: for each rank, what the training without a stop left after saving; None to put nothing back.
        names: which of it to put back.
    """
    seed_streams(plan.seed + 7919 + dist.get_rank())
    model, step, save, load = made_by_start(start(), *_MADE)
    if STEPS in names:
        for i in range(plan.saved_after):
            step(i)
    load(Path(plan.file))
    parts = _parts(model, step, save, load)
    if straight is not None:
        put_back(parts, straight[dist.get_rank()], [name for name in names if name not in (STEPS, PASS)])
    left, loaders = states_of(parts), loaders_that_draw((step, save, load))
    with first_pass_draws_elsewhere(loaders if PASS in names else []) as first_step_is_over:
        states = _go_on(model, step, plan, first_step_is_over)
    return Trace(states, left, states_of(_parts(model, step, save, load), buffers=plan.buffers), len(loaders))


def fresh_start(start: Start, plan: Plan) -> State:
    """The model of this rank as ``start`` makes it where a training is resumed."""
    seed_streams(plan.seed + 7919 + dist.get_rank())
    return state_of(start()[0])


def _parts(model: nn.Module, *functions: Callable[..., object]) -> dict[str, Any]:
    return {_GRADIENTS: Gradients(model), **numbers_of(functions), **parts_of(model, functions)}


def _go_on(
    model: nn.Module, step: Callable[[int], object], plan: Plan, after_a_step: Callable[[], object] = lambda: None
) -> list[State]:
    states = [state_of(model, buffers=plan.buffers)]
    for i in range(plan.saved_after, plan.steps):
        step(i)
        after_a_step()
        states.append(state_of(model, buffers=plan.buffers))
    return states


def first_apart(found: Sequence[Trace], expected: Sequence[Trace]) -> tuple[int, int, str] | None:
    """The first step after saving, rank and tensor that differ."""
    for taken in range(len(expected[0].states)):
        for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
            names = differing([digest(mine.states[taken]), digest(wanted.states[taken])])
            if names:
                return taken, rank, names[0]
    return None
