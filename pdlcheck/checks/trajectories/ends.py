"""The right end of a training, and the comparison of a rank's weights with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Diagnosis
from pdlcheck.checks.evidence.dropout import DRAWS, record_dropout
from pdlcheck.checks.evidence.optimizers import GivenToOptimizer, conditions_of, record_optimizers
from pdlcheck.checks.evidence.recomputations import record_redrawn
from pdlcheck.checks.message import Place, failure, first_and_more, first_index, name_of, show
from pdlcheck.checks.state import State, plain_name, state_of, tied_names, wants_another_dtype
from pdlcheck.checks.trajectories.causes import Ways, diagnose, how_far, how_ranks_differ
from pdlcheck.checks.trajectories.passes import (
    diagnose_own_factor,
    diagnose_weights,
    diagnose_weights_of_some,
    weights_of_passes,
)
from pdlcheck.checks.trajectories.precision import Precision
from pdlcheck.checks.trajectories.rounding import Rounding, or_zeros
from pdlcheck.checks.trajectories.steps import diagnose_steps, hidden_factor
from pdlcheck.errors import Inconclusive

__all__ = ["End", "Goal", "Train", "ends_of", "goal_of", "require_gradients", "require_near"]

Train = Callable[[nn.Module, int], object]

_RENAMED = "it has another name, or another tensor took its place, in the model that train was given"
_REDRAWN = (
    "with other random numbers than the forward pass: activation checkpointing without preserve_rng_state, or with a "
    "seed or a stream of its own in between"
)
_PART = "this rank holds a part of it; parts that are DTensors are compared whole"
_FLAT = (
    "this rank holds a part of it in a flat tensor, as FSDP1 does: have train wrap a copy, and load what "
    "summon_full_params() gives into the model that it was given; what fully_shard divides is compared whole"
)


class End(NamedTuple):
    """The end of a training on one rank.

    Args:
        state: parameters and buffers.
        given: what optimizers were given, by parameter.
        tied: groups of names that share one tensor.
        met: the conditions that the training can meet, and whether it has met them.
        redrawn: the layers that a backward pass ran again with other random numbers, if that was asked for.
    """

    state: State
    given: Mapping[str, GivenToOptimizer]
    tied: Sequence[Sequence[str]] = ()
    met: Mapping[str, bool] | None = None
    redrawn: Sequence[str] = ()


class Goal(NamedTuple):
    """The right end of a training.

    Args:
        begin: the state at the start.
        expected: the right state of each rank.
        given: what the optimizers of each rank were given.
        tied: groups of names that share one tensor.
        rounding: the effect of rounding on the training.
        precision: the tolerances.
        what: the name of the training, for messages.
        steps: the number of steps.
        before: what the optimizers of each rank were given in one step less; empty in the first step.
    """

    begin: State
    expected: Sequence[State]
    given: Sequence[Mapping[str, GivenToOptimizer]]
    tied: Sequence[Sequence[str]]
    rounding: Rounding
    precision: Precision
    what: str
    steps: int
    before: Sequence[Mapping[str, GivenToOptimizer]] = ()


def goal_of(train: Train, start: nn.Module, taken: int, world: Any, world_size: int, precision: Precision) -> Goal:
    """Return the end of ``train`` after ``taken`` steps as the goal."""

    def of_rank_0(model: nn.Module, steps: int) -> State:
        return ends_of(train, model, steps, world, world_size)[0].state

    ends = ends_of(train, start, taken, world, world_size)
    expected, given = [end.state for end in ends], [end.given for end in ends]
    begin = _begin(start, expected[0], lambda: of_rank_0(start, 0), name_of(train))
    rounding = Rounding(lambda model: of_rank_0(model, taken), start, expected[0], precision.dtype)
    return Goal(begin, expected, given, ends[0].tied, rounding, precision, name_of(train), taken)


def ends_of(
    train: Train, start: nn.Module, taken: int, world: Any, world_size: int, *, passes: bool = False
) -> list[End]:
    """Return the end of each rank after ``taken`` steps; with ``passes``, the evidence of backward passes, too."""
    ends: list[End] = world.run(_train, train, start, taken, passes, world_size=world_size)
    return ends


def require_near(
    who: str,
    ranks: Sequence[End],
    rank: int,
    goal: Goal,
    *,
    case: object,
    cause: str | None = None,
    otherwise: str | None = None,
    again: Callable[[], Sequence[End]] | None = None,
) -> bool:
    """Compare the state of one rank with the goal, and return whether any tensor had to move.

    Args:
        who: the beginning of the message.
        ranks: the ends of all ranks.
        rank: the rank to compare.
        goal: the right end.
        case: the facts, as in other messages.
        cause: replaces the likely cause.
        otherwise: a hint if no cause is known.
        again: repeats the training, with the evidence of backward passes.

    Raises:
        AssertionError: names the first wrong tensor, index and value, all wrong tensors, and the likely cause.
        Inconclusive: the goal has NaN or inf, or rounding alone leads as far as the right training.
    """
    __tracebackhide__ = True
    states = [end.state for end in ranks]
    found, what, precision = states[rank], f"{goal.what} holds", goal.precision
    ends = {name: end for name, end in goal.expected[rank].items() if end is not None and _is_a_number(end)}
    begins = {name: or_zeros(goal.begin.get(name), end) for name, end in ends.items()}
    farthest = max((_largest(end - begins[name]) for name, end in ends.items()), default=0.0)
    wrong: list[tuple[str, Tensor, Tensor, Tensor]] = []
    unclear: list[str] = []
    for name, end in ends.items():
        begin, held = begins[name], found.get(name)
        if not end.isfinite().all():
            at = first_index(~end.isfinite())
            raise Inconclusive(f"{who}: {what} {show(end[at])} at {at} of {name}, there is nothing to compare with")
        if held is None:
            others = [other for other in found if other not in goal.expected[rank]]
            flat = any("_flat_param" in other for other in others)
            raise failure(
                f"{who} has no {name}, {what} one",
                instead=", ".join(others[:3]) or None,
                likely_cause=_FLAT if flat else _RENAMED if others else None,
                case=case,
            )
        if held.shape != end.shape:
            shapes = f"{name} of shape {tuple(held.shape)}, {what} one of {tuple(end.shape)}"
            part = _FLAT if held.dim() == 1 < end.dim() else _PART
            raise failure(f"{who} holds {shapes}", likely_cause=part, case=case)
        way = end - begin
        largest = max(_largest(end), _largest(begin))
        allowed = max(precision.of_the_weights * largest, precision.of_the_farthest * farthest)
        off = ~((held - end).abs() <= precision.of_the_way * _largest(way) + allowed)
        if off.any():
            if goal.rounding.explains(name, float((held - end).norm()), float(way.norm())):
                unclear.append(name)
            else:
                wrong.append((name, off, way, held - begin))
    if wrong:
        names, offs, ways, gone = zip(*wrong, strict=True)
        at = first_index(offs[0])
        first, right = found[names[0]], ends[names[0]]
        assert first is not None  # only gradients can be None
        way, went = (torch.cat([_flat(tensor) for tensor in tensors]) for tensors in (ways, gone))
        apart = how_ranks_differ(states, precision, goal.expected, first=names)
        learned = [name for name in names if name.startswith("parameter")]
        parameters = [name for name in ends if name.startswith("parameter")]
        moved = [name for name in parameters if name in learned or _moved(ends, begins, name)]
        ways = Ways(way, went, precision, len(ranks), apart, not learned, goal.what, learned, moved)
        raise failure(
            f"{who} holds {show(first[at])} at {at} of {names[0]}, {what} {show(right[at])}",
            Place(rank, names[0], at, first[at], right[at], goal.steps),
            wrong_tensors=f"{len(names)} of {len(ends)}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}",
            way=how_far(way, went),
            ranks=apart,
            likely_cause=cause or _cause(ways, ranks, rank, goal, otherwise, again),
            case=case,
        )
    if unclear and set(unclear) >= {name for name in ends if _moved(ends, begins, name)}:
        raise Inconclusive(
            f"{who}: {what} weights that rounding in {precision.dtype} alone leads as far, {unclear[0]} among them, "
            "there is nothing to compare; take fewer steps, a lower learning rate or another dtype"
        )
    return farthest > 0


def require_gradients(who: str, ranks: Sequence[End], goal: Goal, *, case: object) -> None:
    """Raise ``AssertionError`` if all gradients of the last step have a factor that the weights do not show."""
    __tracebackhide__ = True
    for rank, end in enumerate(ranks):
        hidden = hidden_factor(end.given, goal.given[rank], goal.precision, len(ranks), goal.what)
        if hidden is not None:
            kind = next(iter(end.given.values())).optimizer
            raise failure(
                f"{who} rank {rank} holds the right weights, but {kind} got wrong gradients, and hides their factor",
                Place(rank, step=goal.steps),
                likely_cause=hidden,
                case=case,
            )


def _cause(
    ways: Ways,
    ranks: Sequence[End],
    rank: int,
    goal: Goal,
    otherwise: str | None,
    again: Callable[[], Sequence[End]] | None,
) -> Diagnosis:
    """Return the cause that the optimizers' steps show, or backward passes; if they show none, that of the weights."""
    untied = [names for names in goal.tied if names not in ranks[rank].tied]
    if untied and {f"parameter {name!r}" for names in untied for name in names} >= set(ways.wrong) != set():
        names = " and ".join(untied[0])
        return Diagnosis(fits=(f"{names} are one tensor in {goal.what}, and are no longer tied in this training",))
    before = goal.before[rank] if goal.before else {}
    shown = diagnose_steps(ways, [end.given for end in ranks], rank, goal.given[rank], before)
    repeated = _repeated(again) if again is not None and ways.apart is None and ways.wrong else None
    if repeated is None:
        return shown if shown.fits else diagnose(ways, otherwise=otherwise, hints=shown.hints)
    given, allowed = [one.given for one in repeated], ways.precision.of_the_way
    weights = weights_of_passes(ways.wrong, given, rank, goal.given[rank], allowed, goal.what)
    if weights is not None and (in_the_loss := diagnose_own_factor(weights)).fits:
        return in_the_loss
    if shown.fits:
        return shown
    of_weights = diagnose(ways, otherwise=otherwise, hints=shown.hints)
    if of_weights.fits:
        return of_weights
    if redrawn := repeated[rank].redrawn:
        layers = first_and_more([*map(repr, redrawn)])
        return Diagnosis(fits=(f"the backward pass runs layer {layers} again {_REDRAWN}",))
    of_passes = (
        diagnose_weights(weights)
        if weights is not None
        else diagnose_weights_of_some(ways.wrong, given, rank, goal.given[rank], allowed, goal.what)
    )
    return of_passes if of_passes.fits else of_weights


def _repeated(again: Callable[[], Sequence[End]]) -> Sequence[End] | None:
    """Return the ends of another run; None if it fails, as a training that keeps a state of its own may."""
    try:
        return again()
    except Exception:
        return None


def _train(train: Train, model: nn.Module, steps: int, passes: bool) -> End:
    torch.manual_seed(dist.get_rank() + 1)
    wide = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    try:
        with (
            record_redrawn(model) if passes else nullcontext(()) as redrawn,
            record_optimizers(model, passes=passes) as given,
            record_dropout(model) as dropped,
        ):
            train(model, steps)
    except RuntimeError as error:
        if wide and wants_another_dtype(error):
            narrow = "; for layers in bfloat16, dtype=torch.bfloat16" if "BFloat16" in str(error) else ""
            error.add_note(
                f"the check gives float64 weights; give float64 data too, or pass dtype=torch.float32{narrow}"
            )
        raise
    tied = [[*map(plain_name, names)] for names in tied_names(model)]
    met = conditions_of(given) | ({DRAWS: any(dropped.values())} if dropped else {})
    return End(state_of(model), given, tied, met, sorted(redrawn))


def _begin(start: nn.Module, ended: State, at_rest: Callable[[], State], name: str) -> State:
    """Return the state at the start, including tensors that the training itself makes, such as adapters."""
    begin = state_of(start)
    made = [tensor for tensor in ended if tensor not in begin]
    if not made:
        return begin
    try:
        return at_rest() | begin
    except Exception as error:
        raise Inconclusive(
            f"{name} makes {made[0]}, which the model that make() gives does not have; how far it went is known where "
            f"{name}(model, 0) takes no step, and that raised {type(error).__name__}: {error}"
        ) from error


def _moved(ends: Mapping[str, Tensor], begins: Mapping[str, Tensor], name: str) -> bool:
    return not torch.equal(ends[name], begins[name])


def _is_a_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _flat(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
