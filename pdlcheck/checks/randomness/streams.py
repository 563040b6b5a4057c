"""The check that ranks with different samples draw different random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from pdlcheck.checks.conditions import meet
from pdlcheck.checks.diagnosis import Candidate, explain
from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.checks.randomness.draws import GLOBAL, OF_TORCH, Draw, Notes, Recorder, code_of, inside, others_noted
from pdlcheck.checks.randomness.workers import IN_WORKER, loaders_of, workers_noted
from pdlcheck.errors import Inconclusive

__all__ = ["check_random_streams"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_OTHER_NUMBERS = "other seeds, or one rank draws more often"


@takes_world
def check_random_streams(
    make: Callable[[], Any],
    step: Callable[[Any], object],
    world: Any,
    *,
    world_size: int = 2,
    steps: int = 2,
    same_samples: Sequence[Sequence[int]] = (),
    divided: Callable[[Any], Sequence[nn.Module]] | None = None,
    generators: Callable[[Any], Sequence[Generator]] | None = None,
    agreed: Sequence[Literal["random", "numpy.random"] | Callable[..., Any]] = (),
) -> None:
    """Check that no two ranks draw the same random numbers, and that no rank repeats those of an earlier step.

    Ranks draw the same numbers if all have the same seed. A rank repeats numbers if each step begins with one seed.
    Dropout masks, noise and augmentations would then be the same.

    The check compares the state of the generator before a draw, not the numbers. So shapes, probabilities and order do
    not matter. The same seed for the initial weights is fine. Ranks may also agree on the order of samples, with
    generators of the program's own (``generator=``) and with permutations. The seed that a ``DataLoader`` draws counts
    if it has workers, because they receive it. What workers draw counts, too, if ``step`` reaches the loader.

    Args:
        make: called as ``make()`` on every rank: seeds as the program does, and returns the model or whatever ``step``
            works on.
        step: called as ``step(made)`` on every rank, in training mode.
        world: where the ranks run.
        world_size: number of ranks.
        steps: number of calls of ``step``.
        same_samples: sets of ranks that work on the same samples, as in tensor parallelism, and may draw alike.
        divided: called as ``divided(made)`` on every rank; returns the modules that are divided over such a set, as
            attention heads and parts of a sequence are. In their forward passes, torch must draw different numbers
            there, too. Elsewhere the ranks of a set must then draw alike, because they hold the same activations.
        generators: called as ``generators(made)`` on every rank; returns those generators of the program's own that
            draw masks, noise or augmentations. They may be torch's, NumPy's or Python's. Their draws count, too.
        agreed: generators or functions with which all ranks decide together, for example on layers to drop or on a
            length. All ranks must draw alike from a global generator that is named here. Torch must draw alike in a
            function that is given here.

    Raises:
        AssertionError: names both ranks, the call and its line on each, and the seed if it is the same; or the two
            steps.
        Inconclusive: no step draws random numbers of torch's, NumPy's or Python's global generators, or of
            ``generators``.
        ValueError: ``world_size``, ``steps`` or ``agreed`` is not valid.

    Example:
        >>> import torch.distributed as dist
        >>> from torch import nn
        >>> from pdlcheck.worlds import get_world
        >>> def make():
        ...     torch.manual_seed(0)
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
        ...     torch.manual_seed(1 + dist.get_rank())
        ...     return model
        >>> check_random_streams(make, lambda model: model(torch.ones(2, 4)), get_world("sim"))
    """
    __tracebackhide__ = True
    if world_size < 2 or steps < 1:
        raise ValueError(
            f"check_random_streams compares ranks over steps: world_size must be 2 or more, got {world_size}, "
            f"steps 1 or more, got {steps}"
        )
    for name in agreed:
        if code_of(name) is None if callable(name) else name not in GLOBAL:
            known = ", ".join(map(repr, GLOBAL))
            raise ValueError(f"check_random_streams takes as agreed {known} and functions in Python, got {name!r}")
    names = tuple(GLOBAL[name] for name in agreed if isinstance(name, str))
    plan = _Plan(steps, generators, divided, names, tuple(one for one in agreed if callable(one)))
    ranks: list[_Drawn] = world.run(_record, make, step, plan, world_size=world_size)
    facts = case(world, world_size, steps=steps)
    if not any(drawn.draws or drawn.decides or drawn.decisions for drawn in ranks):
        others = "" if generators is None else ", nor of those that it was given,"
        raise Inconclusive(
            f"{name_of(step)} draws no random numbers of torch's, NumPy's or Python's global generators{others} in "
            f"{steps} step(s): is the model in training mode?"
        )
    together = [set(ranks_of_one) for ranks_of_one in same_samples]
    for rank in range(world_size):
        _require_agreement(name_of(step), rank, ranks, facts)
        for other in range(rank):
            alike = any({rank, other} <= ranks_of_one for ranks_of_one in together)
            if alike and divided is not None:
                _require_same_outside(name_of(step), (other, rank), (ranks[other], ranks[rank]), facts)
            _compare(name_of(step), (other, rank), (ranks[other], ranks[rank]), facts, divided_alone=alike)
    for rank, drawn in enumerate(ranks):
        if drawn.again is not None:
            where, before, now = drawn.again
            raise failure(
                f"{name_of(step)}: rank {rank} draws in step {now} the random numbers of step {before}: {where}",
                likely_cause="worker_init_fn gives a worker one seed in every pass: add torch.initial_seed(), which "
                "differs from pass to pass"
                if IN_WORKER in where
                else "each step begins with one seed: add the step to it, or seed once, before the first",
                case=facts,
            )
    workers = [one for drawn in ranks for one in drawn.workers]
    meet({"workers of a DataLoader": any(workers)} if workers else {})


class _Plan(NamedTuple):
    """The arguments of :func:`check_random_streams` that every rank needs.

    ``agreed`` names generators as messages do; ``deciders`` are the functions among the argument ``agreed``.
    """

    steps: int
    generators: Callable[[Any], Sequence[Generator]] | None
    divided: Callable[[Any], Sequence[nn.Module]] | None
    agreed: tuple[str, ...]
    deciders: tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class _Drawn:
    """The draws of one rank.

    Args:
        draws: by the state of the generator before the draw.
        divided: the states before draws in divided modules.
        again: the place, the earlier step and the later step of a state that came back.
        together: the states of each generator with which ranks agree, after each step.
        decides: whether one of these generators has drawn.
        decisions: the state of torch's generator before each draw in a function in which ranks decide, and the place.
        seed: of torch, before the first step.
        workers: for each loader that the step reaches, whether it has workers.
    """

    draws: dict[str, Draw]
    divided: set[str]
    again: tuple[str, int, int] | None
    together: dict[str, list[str]]
    decides: bool
    decisions: list[tuple[str, str]]
    seed: int
    workers: list[bool]


def _require_agreement(who: str, rank: int, ranks: Sequence[_Drawn], facts: str) -> None:
    __tracebackhide__ = True
    for name, states in ranks[rank].together.items():
        others = ranks[0].together[name]
        for number, (own, other) in enumerate(zip(states, others, strict=True)):
            if own != other:
                raise failure(
                    f"{who}: ranks 0 and {rank} decide together by {name}, and have drawn other numbers from it by the "
                    f"end of step {number}",
                    likely_cause=_OTHER_NUMBERS,
                    case=facts,
                )
    for of_this, of_first in zip_longest(ranks[rank].decisions, ranks[0].decisions):
        if of_this is None or of_first is None or of_this[0] != of_first[0]:
            here, there = ("nowhere" if one is None else f"in {one[1]}" for one in (of_this, of_first))
            raise failure(
                f"{who}: ranks 0 and {rank} decide together and draw other numbers: rank 0 {there}, rank {rank} {here}",
                likely_cause=_OTHER_NUMBERS,
                case=facts,
            )


def _require_same_outside(who: str, numbers: tuple[int, int], ranks: tuple[_Drawn, _Drawn], facts: str) -> None:
    """Check that two ranks with the same samples draw alike outside of divided modules."""
    __tracebackhide__ = True
    outside = [{state: draw for state, draw in one.draws.items() if state not in one.divided} for one in ranks]
    for place, (mine, other) in enumerate((outside, outside[::-1])):
        for state, draw in mine.items():
            if state not in other:
                rank, twin = numbers[place], numbers[1 - place]
                raise failure(
                    f"{who}: rank {rank} draws random numbers that rank {twin}, which works on the same samples, does "
                    f"not draw: in {draw.where}",
                    likely_cause="both hold the whole activation there, so their masks must be equal: seed the ranks "
                    "of a set alike, and draw in divided modules from a stream of the rank's; what is divided, as the "
                    "parts of a sequence are, belongs in divided=",
                    case=facts,
                )


def _compare(
    who: str, numbers: tuple[int, int], ranks: tuple[_Drawn, _Drawn], facts: str, *, divided_alone: bool
) -> None:
    __tracebackhide__ = True
    (first, second), (of_first, of_second) = numbers, ranks
    same = [state for state in of_first.draws if state in of_second.draws]
    if divided_alone:
        same = [state for state in same if state in of_first.divided & of_second.divided]
    if not same:
        return
    one, two = of_first.draws[same[0]], of_second.draws[same[0]]
    seeded = one.seed == two.seed and same[0].startswith(OF_TORCH)
    sums_meet = one.step != two.step and one.seed != of_first.seed
    in_workers = IN_WORKER in one.where and IN_WORKER in two.where
    table = {
        "each holds a part of a divided module, whose masks must differ: draw there from a stream of the rank's": (
            divided_alone
        ),
        "worker_init_fn gives workers of both ranks one seed: add rank * num_workers to it, or leave the seeds to the "
        "DataLoader, which draws them from torch's generator": in_workers,
        f"torch.manual_seed({one.seed}) in step {one.step} of rank {first} and in step {two.step} of rank {second}: "
        "sums of step and rank meet; step * world_size + rank does not": seeded and sums_meet,
        f"torch.manual_seed({one.seed}) on both: add the rank to the seed once the weights are made": seeded,
        "the generator is in one state on both: add the rank to what it is seeded with; agreed= is for global ones by "
        "which ranks decide together": True,
    }
    raise failure(
        f"{who}: ranks {first} and {second} draw the same random numbers: "
        f"rank {first} in {one.where}, rank {second} in {two.where}",
        draws=f"{len(of_first.draws)} on rank {first}, {len(of_second.draws)} on rank {second}, {len(same)} the same",
        likely_cause=explain(same, *([Candidate.when(text, true)] for text, true in table.items())),
        case=facts,
    )


def _record(make: Callable[[], Any], step: Callable[[Any], object], plan: _Plan) -> _Drawn:
    made = make()
    seed = torch.initial_seed()
    own = [] if plan.generators is None else list(plan.generators(made))
    for one in own:
        if not isinstance(one, Generator):
            raise TypeError(
                "check_random_streams takes generators of torch, NumPy or Python, such as torch.Generator(), got "
                f"{type(one).__name__}"
            )
    torchs = [one for one in own if isinstance(one, torch.Generator)]
    others = [one for one in own if not isinstance(one, torch.Generator)]
    together: dict[str, list[str]] = {name: [] for name in plan.agreed}
    notes = Notes(plan.deciders)
    with inside([] if plan.divided is None else plan.divided(made), notes):
        for number in range(plan.steps):
            notes.step = number
            with (
                workers_noted(notes, (partial(step, made),), plan.agreed),
                others_noted(notes, others, together),
                Recorder(notes, torchs),
            ):
                step(made)
    workers = [bool(loader.num_workers) for loader in loaders_of((partial(step, made),))]
    return _Drawn(notes.draws, notes.divided, notes.again, together, notes.decides, notes.decisions, seed, workers)
