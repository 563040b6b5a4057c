"""The check of local SGD and similar rules: a simulation of all replicas in one process is the reference.

The check compares in float64 and after every step, including momentum and buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import Place, case, failure, first_and_more, first_index, name_of, show, takes_world
from pdlcheck.checks.replicas.rules import (
    Course,
    Rule,
    Trace,
    alternatives,
    backward,
    look,
    simulate,
    with_other_buffers,
)
from pdlcheck.checks.state import require_bits
from pdlcheck.errors import Inconclusive
from pdlcheck.operations.words import listed

__all__ = ["check_local_sgd"]

MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)

# A dozen float64 steps lose some 1e-14. One wrong gradient or a missed average moves a weight by 1e-3 or more.
RELATIVE = 1e-8


@takes_world
def check_local_sgd(
    wrap: Callable[..., Any],
    world: Any,
    *,
    sync_every: int | None,
    steps: int | Sequence[int] = 6,
    world_size: int = 3,
    optimizer: Callable[..., Optimizer] = MOMENTUM,
    make: Callable[[], nn.Module] | None = None,
    momentum: Literal["average", "keep", "reset"] = "keep",
    buffers: Literal["average", "broadcast", "keep"] | None = None,
    integer_buffers: Literal["broadcast", "keep", "round", "truncate"] | None = None,
    synchronous_steps: int = 0,
    first_round: int | None = None,
    gradients_every: int | None = None,
    outer: tuple[float, float, bool] | None = None,
    nodes: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> None:
    """Check that replicas trained by the result of ``wrap`` hold, after each step, the values of simulated replicas.

    The simulation is a loop over the replicas in this process. Each replica takes its step with its own samples. After
    every ``sync_every``-th step all models become their mean. The other arguments change this rule. After a round, the
    weights of all ranks must be equal bit for bit.

    Args:
        wrap: called as ``wrap(optimizer, model)`` on every rank, with ``node_group=group`` if ``nodes`` are given;
            returns an object with ``step()``, called after each backward, and ``finish()`` if steps are uneven.
        world: where the ranks run.
        sync_every: steps between two averages of the models; None for never.
        steps: of every rank; or a sequence with one number for each rank, for uneven steps. A rank without further
            steps calls ``finish`` and keeps its model. It counts as any other rank in the averages until all have
            finished; then all models are averaged.
        world_size: number of replicas, 2 or more; not used if ``steps`` is a sequence.
        optimizer: makes the optimizer from the parameters.
        make: makes the model, two inputs and one output; the default has batch norm. It is made once, cast to float64
            and copied to every rank.
        momentum: the treatment of the optimizer's state in a round. ``"reset"`` begins with a new state, or with zeros
            where that is the same.
        buffers: the treatment of the buffers in a round. It has no default: if the values of buffers depend on it, as
            those of batch norm do, the check asks for it.
        integer_buffers: with ``buffers="average"``, the treatment of integers that differ between ranks, as a count of
            batches does after uneven steps. ``"round"`` and ``"truncate"`` treat the mean. It has no default, too.
        synchronous_steps: number of steps at the start that use the mean gradient of the ranks that have not finished.
        first_round: the step after which models are averaged first, counted from 1 after the synchronous steps; None is
            ``sync_every``. 1 is right for torch's ``PeriodicModelAverager(sync_every, synchronous_steps)``.
        gradients_every: gradients are averaged over all ranks in every k-th step.
        outer: rate, momentum and use of Nesterov's rule of an outer SGD. It steps from the last round's model with
            ``last model - mean model`` as the gradient.
        nodes: groups of ranks that average their gradients in every step; each rank is in one of them.
        seed: of weights and samples.

    Raises:
        AssertionError: names the first step after which a rank holds a wrong value, the tensor and the index. The
            likely cause is, for example, an average one step too late, the momentum of rank 0 alone, or an outer step
            in the wrong direction.
        ValueError: ``buffers`` or ``integer_buffers`` is needed. The message names the treatment that the trainer has.
        Inconclusive: the replicas are never averaged in so many steps.

    Example:
        >>> from pdlcheck.primitives import LocalSGD
        >>> from pdlcheck.worlds import get_world
        >>> def wrap(optimizer, model):
        ...     return LocalSGD(optimizer, model, sync_every=2)
        >>> check_local_sgd(wrap, get_world("sim"), sync_every=2, buffers="broadcast")
    """
    __tracebackhide__ = True
    each = (steps,) * world_size if isinstance(steps, int) else tuple(steps)
    if len(each) < 2:
        raise ValueError(f"check_local_sgd compares replicas, it needs world_size 2 or more, got {len(each)}")
    counts = {"sync_every": sync_every, "first_round": first_round, "gradients_every": gradients_every}
    for name, every in counts.items():
        if every is not None and every < 1:
            raise ValueError(f"check_local_sgd needs a {name} of 1 or more, or None, got {every}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (_net if make is None else make)().double()
    course = Course(model, optimizer, each, finish=not isinstance(steps, int), seed=seed)
    parts = tuple(tuple(part) for part in nodes)
    rule = Rule(
        sync_every,
        gradients_every,
        synchronous_steps,
        momentum,
        buffers or "broadcast",
        integer_buffers,
        outer,
        parts,
        first_round,
    )
    expected = simulate(course, rule)
    alone = simulate(
        Course(model, optimizer, each, finish=False, seed=seed), Rule(None, buffers="keep", momentum="keep")
    )
    if all(_first_wrong(e[: len(a)], a) is None for e, a in zip(expected, alone, strict=True)) and not course.finish:
        raise Inconclusive(f"{name_of(wrap)}: in {each} steps the replicas never meet, the check would see nothing")
    found: list[Trace] = world.run(_trained, wrap, course, parts, world_size=len(each))
    if buffers is None:
        _require_told("buffers", ("keep", "broadcast", "average"), found, course, rule)
    elif buffers == "average" and integer_buffers is None:
        _require_told("integer_buffers", ("keep", "broadcast", "round", "truncate"), found, course, rule)
    facts = case(world, len(each), steps=_short(each), sync_every=sync_every, **_unusual(rule), seed=seed)
    wrong = [_first_wrong(have, want) for have, want in zip(found, expected, strict=True)]
    at_fault = [rank for rank, place in enumerate(wrong) if place is not None]
    if at_fault:
        rank = min(at_fault, key=lambda rank: wrong[rank] or (0, ""))
        step, name = wrong[rank] or (0, "")
        _raise_wrong(
            f"{name_of(wrap)}: {_after(step, each[rank])} rank {rank}",
            Place(rank, name, step=step + 1),
            found[rank][step],
            expected[rank][step],
            wrong_ranks=", ".join(map(str, at_fault)),
            likely_cause=_diagnose(found, course, rule, _divisor(found[rank][step], expected[rank][step], len(each))),
            case=facts,
        )
    _require_equal_replicas(name_of(wrap), found, rule, each, facts)


def _require_told(name: str, ways: Sequence[str], found: list[Trace], course: Course, rule: Rule) -> None:
    """Check that no tensor depends on an argument that is not given.

    Args:
        name: the argument.
        ways: its values.
        found: the trace of each rank.
        course: the training.
        rule: the rule without the argument.

    Raises:
        ValueError: a tensor depends on it.
    """
    traces = {way: simulate(course, replace(rule, **{name: way})) for way in ways}  # type: ignore[arg-type]
    different = [
        place
        for one, other in combinations(ways, 2)
        for have, want in zip(traces[one], traces[other], strict=True)
        if (place := _first_wrong(have, want)) is not None
    ]
    if not different:
        return
    step, tensor = min(different)
    done = [way for way, trace in traces.items() if all(map(_equal, found, trace))]
    hint = f"; this trainer does what {name}={done[0]!r} stands for" if len(done) == 1 else ""
    kind = "integer buffers" if name == "integer_buffers" else "buffers"
    raise ValueError(
        f"check_local_sgd needs {name}=, because {tensor} of step {step + 1} depends on what a round does to {kind}; "
        f"pass {', '.join(map(repr, ways[:-1]))} or {ways[-1]!r}, whichever is meant{hint}"
    )


def _net() -> nn.Module:
    """Make a small model with buffers.

    The layer before the norm has no bias, because its gradient would be round-off, which Adam would enlarge.
    """
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))


def _trained(wrap: Callable[..., Any], course: Course, nodes: Sequence[Sequence[int]]) -> Trace:
    """Run on every rank: take its steps, and return the state after each."""
    rank = dist.get_rank()
    torch.manual_seed(rank + 1)
    optimizer = course.optimizer(course.model.parameters())
    groups = [dist.new_group(list(part)) for part in nodes]
    mine = [group for group, part in zip(groups, nodes, strict=True) if rank in part]
    trainer = wrap(optimizer, course.model, node_group=mine[0]) if mine else wrap(optimizer, course.model)
    needed = ["step", *(["finish"] if course.finish else [])]
    if missing := [name for name in needed if not callable(getattr(trainer, name, None))]:
        raise TypeError(f"wrap must return an object with {missing[0]}(), it returned a {type(trainer).__name__}")
    trace: Trace = []
    for step in range(course.steps[rank]):
        backward(course, course.model, rank, step)
        trainer.step()
        trace.append(look(course.model, optimizer))
    if course.finish:
        trainer.finish()
        trace.append(look(course.model, optimizer))
    return trace


def _first_wrong(found: Trace, expected: Trace) -> tuple[int, str] | None:
    """Return the first step at which two traces differ, and the tensor."""
    for step, (have, want) in enumerate(zip(found, expected, strict=True)):
        for name in {**want, **have}:
            if _off(*_both(name, have, want)).any():
                return step, name
    return None


def _equal(found: Trace, expected: Trace) -> bool:
    return _first_wrong(found, expected) is None


def _both(name: str, *holders: dict[str, Tensor]) -> list[Tensor]:
    """Return the tensor of each holder by that name, with zeros if it is absent.

    If absence means another training, the next step shows the difference.
    """
    held = next(holder[name] for holder in holders if name in holder)
    return [holder[name] if name in holder else torch.zeros_like(held) for holder in holders]


def _off(found: Tensor, expected: Tensor) -> Tensor:
    if found.shape != expected.shape:
        return torch.ones(1, dtype=torch.bool)
    if expected.is_floating_point() and not found.is_floating_point() and expected.isnan().all():
        return torch.zeros(found.shape, dtype=torch.bool)  # an integer buffer that has no right value
    if expected.dtype == torch.bool:
        return found != expected
    scale = max(float(expected.abs().max()), 1e-6) if expected.numel() else 0.0
    return ~((found.double() - expected.double()).abs() <= RELATIVE * scale)


def _raise_wrong(who: str, place: Place, have: dict[str, Tensor], want: dict[str, Tensor], **details: object) -> None:
    """Raise the error for the tensor at ``place``: a rank holds ``have``, the reference ``want``."""
    __tracebackhide__ = True
    name = place.tensor
    assert name is not None
    if name not in have or name not in want:
        holders = ("nothing", "values") if name not in have else ("values", "nothing")
        raise failure(
            f"{who} holds {holders[0]} as {name}, replicas in one process hold {holders[1]}", place, **details
        )
    at = first_index(_off(have[name], want[name]))
    raise failure(
        f"{who} holds {show(have[name][at])} at {at} of {name}, replicas in one process hold {show(want[name][at])}",
        replace(place, index=at, found=have[name][at], expected=want[name][at]),
        **details,
    )


def _diagnose(found: list[Trace], course: Course, rule: Rule, divisor: str | None) -> Diagnosis:
    """Return the wrong rules that explain the traces of all ranks.

    If none does, try each wrong rule with another treatment of buffers, and then ``divisor``.
    """

    def explains(other: Rule, found: list[Trace]) -> bool:
        traces = simulate(course, other)
        return all(_first_wrong(have, want) is None for have, want in zip(found, traces, strict=True))

    def candidate(text: str, other: Rule) -> Candidate[list[Trace]]:
        return Candidate(text, holds=partial(explains, other))

    others = list(alternatives(rule))
    has_buffers = any(name.startswith("buffer") for name in found[0][0])
    return explain(
        found,
        [candidate(text, other) for text, other in others],
        *(
            [candidate(f"{text}; and {and_buffers}", both)]
            for text, other in (others if has_buffers else ())
            for and_buffers, both in (with_other_buffers(other) if other.buffers == rule.buffers else ())
        ),
        _of_unlike_rounds(found, min(course.steps), rule),
        [] if divisor is None else [Candidate.when(divisor, True)],
    )


def _of_unlike_rounds(found: list[Trace], steps: int, rule: Rule) -> Iterator[Candidate[list[Trace]]]:
    """Yield a cause if ranks hold equal values of some parameters after other steps than of others."""
    rounds: dict[tuple[int, ...], list[str]] = {}
    for name in (name for name in found[0][0] if name.startswith("parameter")):
        values = [[trace[step][name] for trace in found] for step in range(steps)]
        if any(torch.equal(*pair) for now, then in pairwise(values) for pair in zip(now, then, strict=True)):
            continue  # a rank does not train it in each step, so that equal values prove nothing
        at = tuple(step + 1 for step, own in enumerate(values) if all(torch.equal(one, own[0]) for one in own))
        rounds.setdefault(at, []).append(name)
    told = "; ".join(
        f"{first_and_more(names)} {_after_steps(at)}" for at, names in sorted(rounds.items(), reverse=True)
    )
    due = _after_steps([step + 1 for step in range(steps) if rule.meets(step)])
    why = (
        "a count of steps goes on at each parameter, not at each step"
        if len(rounds) > 2 or () not in rounds
        else f"the average leaves out {first_and_more(rounds[()])}"
    )
    yield Candidate(
        f"parameters are averaged after different steps: {told}; by the rule all are averaged {due}: {why}",
        holds=lambda _: len(rounds) > 1,
        short="parameters that are averaged at different times",
    )


def _after_steps(steps: Sequence[int]) -> str:
    return f"after step{'s' * (len(steps) > 1)} {listed(steps)}" if steps else "never"


def _divisor(have: dict[str, Tensor], want: dict[str, Tensor], count: int) -> str | None:
    """Return a text with the divisor of the summed models, if all weights are one factor times their mean.

    Return None if the factor is 1.
    """
    names = [name for name in want if name.startswith("parameter")]
    found, mean = (torch.cat([held[name].flatten().double() for name in names]) for held in (have, want))
    factor = float(found.dot(mean) / mean.dot(mean)) if mean.any() else 0.0
    if (
        factor <= 0
        or abs(factor - 1) <= RELATIVE
        or not ((found - factor * mean).abs() <= RELATIVE * found.abs().max()).all()
    ):
        return None
    return f"all weights are {factor:.6g} times the mean: {count} models were added and divided by {count / factor:.6g}"


def _require_equal_replicas(who: str, found: list[Trace], rule: Rule, steps: Sequence[int], facts: str) -> None:
    __tracebackhide__ = True
    meetings = [step for step in range(min(steps)) if step < rule.synchronous_steps or rule.meets(step)]
    for step in [*meetings, *([-1] if len(found[0]) > steps[0] else [])]:
        for rank, trace in enumerate(found[1:], start=1):
            for name, value in trace[step].items():
                if name.startswith("parameter"):
                    where = "after finish" if step < 0 else f"after step {step + 1}"
                    require_bits(
                        f"{who}: replicas differ {where}: rank {rank}",
                        name,
                        (value, found[0][step][name]),
                        "rank 0 holds",
                        Place(rank, step=step + 1 if step >= 0 else None),
                        case=facts,
                    )


def _after(step: int, steps: int) -> str:
    return f"after step {step + 1}" if step < steps else "after finish"


def _short(steps: Sequence[int]) -> object:
    return steps[0] if len({*steps}) == 1 else list(steps)


def _unusual(rule: Rule) -> dict[str, object]:
    """Return the fields of the rule that differ from the defaults."""
    usual = Rule(rule.models_every)
    names = (
        "first_round",
        "gradients_every",
        "synchronous_steps",
        "momentum",
        "buffers",
        "integer_buffers",
        "outer",
        "nodes",
    )
    return {name: getattr(rule, name) for name in names if getattr(rule, name) != getattr(usual, name)}
