"""The training runs that ``check_resume`` compares: without a stop, with a save, and resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdlcheck.checks.checkpoint.events import Course, watching_events
from pdlcheck.checks.checkpoint.unsaved_state import (
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
from pdlcheck.checks.evidence.batches import Reading, record_batches
from pdlcheck.checks.message import made_by_start
from pdlcheck.checks.state import State, differing, digest, state_of

__all__ = [
    "BEFORE_LOAD",
    "OF_NO_FUNCTION",
    "PASS",
    "STEPS",
    "Plan",
    "Start",
    "Trace",
    "first_apart",
    "fresh_start",
    "left_by_start",
    "numbers_of_torch_after_load",
    "reading_of_resumed_run",
    "reading_of_straight_run",
    "resumed_run",
    "run_to_save",
    "straight_run",
    "with_what_was_left",
]

Start = Callable[[], tuple[nn.Module, Callable[[int], object], Callable[[Path], object], Callable[[Path], object]]]

PASS = "the seed that a DataLoader draws from the random numbers of torch when a pass begins"
STEPS = "what the steps before leave behind, such as the position in an iterator over the data"

BEFORE_LOAD = 15485863  # a seed that no program takes
_SMALL = 2**22  # elements of a model, which the check may compare at each step
_MADE = ("model", "step", "save", "load")
_GRADIENTS = "the gradients of the model"
OF_NO_FUNCTION = {*STREAMS, _GRADIENTS}


@dataclass(frozen=True)
class Plan:
    """The plan of a run: steps before saving, steps in all, the file, whether buffers are compared, and the seed."""

    saved_after: int
    steps: int
    file: str
    buffers: bool
    seed: int


@dataclass(frozen=True)
class Trace:
    """The states of one rank after saving or loading, and after each further step.

    ``left``: the states of all other parts after saving or loading. A run that does not look records only the random
    numbers. ``end``: the states of all other parts after the last step. ``loaders``: the number of loaders that draw
    seeds from the random numbers of torch. ``unread``: the parts whose state cannot be read, with the error.
    ``course``: the steps of a run without a stop. ``seconds``: the time that its steps took of the processor.
    """

    states: list[State]
    left: dict[str, Any]
    end: dict[str, Any]
    loaders: int = 0
    unread: dict[str, str] = field(default_factory=dict)
    course: Course | None = None
    seconds: float = 0.0


def straight_run(start: Start, plan: Plan, saves: bool, looks: bool = False, digests: bool = False) -> Trace:
    """Train on this rank without a stop; with ``saves``, save on the way.

    ``looks``: record the states of all parts at the point of saving. Reading a state may have side effects: a loader
    may begin a pass in order to have a state. The check therefore compares runs that do not look. ``digests``: record
    the digests of the model at each step, if it is small.
    """
    seed_streams(plan.seed + dist.get_rank())
    model, step, save, load = made_by_start(start(), *_MADE)
    began = time.process_time()
    with watching_events((step, save, load)) as events:
        digests = digests and sum(one.numel() for one in model.parameters() if not is_lazy(one)) <= _SMALL
        found = [_digests(model, plan)] if digests else []
        for i in range(plan.saved_after):
            step(i)
            events.end_step()
            if digests:
                found.append(_digests(model, plan))
        if saves:
            save(Path(plan.file))
        left, unread = _look(model, step, save, load) if looks else (states_of({}), {})
        states = _go_on(model, step, plan, events.end_step)
        course = events.course([*found, *(digest(state) for state in states[1:])] if digests else ())
    seconds = time.process_time() - began
    end = states_of(_parts(model, step, save, load), buffers=plan.buffers)
    return Trace(states, left, end, unread=unread, course=course, seconds=seconds)


def _digests(model: nn.Module, plan: Plan) -> dict[str, str]:
    lazy = any(is_lazy(one) for one in model.parameters())  # before the first step
    return {} if lazy else digest(state_of(model, buffers=plan.buffers))


def run_to_save(start: Start, plan: Plan, folder: Path) -> None:
    """Take the steps before saving on this rank, then save into ``folder``."""
    seed_streams(plan.seed + dist.get_rank())
    _, step, save, _ = made_by_start(start(), *_MADE)
    for i in range(plan.saved_after):
        step(i)
    save(folder / Path(plan.file).name)


def resumed_run(
    start: Start, plan: Plan, straight: list[dict[str, Any]] | None, names: list[str], looks: bool = False
) -> Trace:
    """Resume the training on this rank from the plan's file.

    Args:
        start: makes the model and the functions of the training.
        plan: the steps, the file and the seed.
        straight: for each rank, the states after saving in the training without a stop; None to restore nothing.
        names: the names of the states to restore.
        looks: as in :func:`straight_run`, after loading.
    """
    seed_streams(plan.seed + 7919 + dist.get_rank())
    model, step, save, load = made_by_start(start(), *_MADE)
    if STEPS in names:
        for i in range(plan.saved_after):
            step(i)
    load(Path(plan.file))
    if straight is not None:
        parts = _parts(model, step, save, load)
        put_back(parts, straight[dist.get_rank()], [name for name in names if name not in (STEPS, PASS)])
    left, unread = _look(model, step, save, load) if looks else (states_of({}), {})
    loaders = loaders_that_draw((step, save, load))
    with first_pass_draws_elsewhere(loaders if PASS in names else []) as first_step_is_over:
        states = _go_on(model, step, plan, first_step_is_over)
    end = states_of(_parts(model, step, save, load), buffers=plan.buffers)
    return Trace(states, left, end, len(loaders), unread)


def reading_of_straight_run(start: Start, plan: Plan) -> Reading:
    """Return the data that this rank reads in a training without a stop."""
    seed_streams(plan.seed + dist.get_rank())
    with record_batches() as record:
        model, step, _, _ = made_by_start(start(), *_MADE)
        record.watch(model)
        for i in range(plan.steps):
            record.reading.step = i + 1
            step(i)
    return record.reading


def reading_of_resumed_run(start: Start, plan: Plan) -> Reading:
    """Return the data that this rank reads in the resumed training; what ``load`` reads is that of the last step."""
    seed_streams(plan.seed + 7919 + dist.get_rank())
    with record_batches() as record:
        model, step, _, load = made_by_start(start(), *_MADE)
        record.watch(model)
        record.reading.step = plan.saved_after
        load(Path(plan.file))
        for i in range(plan.saved_after, plan.steps):
            record.reading.step = i + 1
            step(i)
    return record.reading


def with_what_was_left(
    start: Start, plan: Plan, world: Any, resumed: Sequence[Trace], straight: Sequence[Trace]
) -> tuple[list[Trace], list[Trace]]:
    """Return both sets of traces, completed with the ``left`` states of equal runs that look."""
    size = len(straight)
    looked = (
        world.run(resumed_run, start, plan, None, [], True, world_size=size),
        world.run(straight_run, start, plan, False, True, world_size=size),
    )
    seen = [
        [replace(one, left=other.left, unread=other.unread) for one, other in zip(runs, others, strict=True)]
        for runs, others in zip((resumed, straight), looked, strict=True)
    ]
    return seen[0], seen[1]


def fresh_start(start: Start, plan: Plan) -> State:
    """Return the state of this rank's model as ``start`` makes it for a resumed training."""
    seed_streams(plan.seed + 7919 + dist.get_rank())
    return state_of(start()[0])


def left_by_start(start: Start, plan: Plan) -> dict[str, Any]:
    """Return the states of all parts as ``start`` makes them for a resumed training, before loading."""
    seed_streams(plan.seed + 7919 + dist.get_rank())
    return _look(*made_by_start(start(), *_MADE))[0]


def numbers_of_torch_after_load(start: Start, plan: Plan) -> tuple[Tensor, int]:
    """Return the state of torch's random numbers after loading, and their seed.

    They are seeded right before the loading, so the state is that seed's only if ``load`` does not set it.
    """
    *_, load = made_by_start(start(), *_MADE)
    torch.manual_seed(BEFORE_LOAD)
    load(Path(plan.file))
    return torch.get_rng_state(), torch.initial_seed()


def _look(model: nn.Module, *functions: Callable[..., object]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the states of all parts, and the errors of those whose state cannot be read."""
    unread: dict[str, str] = {}
    return states_of(_parts(model, *functions), unread=unread), unread


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
    """Return the first step after saving, the rank and the tensor that differ; None if all are equal."""
    for taken in range(len(expected[0].states)):
        for rank, (mine, wanted) in enumerate(zip(found, expected, strict=True)):
            names = differing([digest(mine.states[taken]), digest(wanted.states[taken])])
            if names:
                return taken, rank, names[0]
    return None
