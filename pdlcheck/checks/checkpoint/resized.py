"""The part of ``check_resume`` that resumes on another number of ranks than have saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdlcheck.checks.checkpoint.resized_causes import cause_in_error, cause_in_parts, cause_in_weights, in_words
from pdlcheck.checks.checkpoint.runs import Plan, Start, Trace, resumed_run, straight_run
from pdlcheck.checks.message import Place, failure, first_index, show
from pdlcheck.checks.state import State
from pdlcheck.checks.tolerances import NARROW, RELATIVE, distance
from pdlcheck.errors import Inconclusive, PdlcheckError

__all__ = ["require_resumes_on"]

_OF_MOVED = 1e-3  # of the way that a tensor has gone since the save: rounding stays below, a lost state does not
_SPREADS = 4.0  # how many times the difference that the number of ranks itself makes
_MOST_SPREAD = 0.05  # of that way; where more, the training depends on the number of ranks


@dataclass(frozen=True)
class Trouble:
    """The first tensor of the resumed run that is wrong: steps after loading, rank, name, and the wrong elements."""

    taken: int
    rank: int
    name: str
    wrong: Tensor | None


def require_resumes_on(
    who: str, start: Start, plan: Plan, world: Any, straight: Sequence[Trace], world_size: int, *, case: str
) -> None:
    """Check that ``world_size`` ranks continue from the plan's file, which another number of ranks has saved.

    The resumed run is compared with a run of as many ranks without a stop. A tensor may differ from it as far as
    numbers round that are added in another order, and a few times as far as the two runs without a stop differ from
    each other.

    Args:
        who: the subject, for the message.
        start: makes the model and the functions of the training.
        plan: the steps, the file and the seed.
        world: where the ranks run.
        straight: the traces of the ranks that have saved, without a stop.
        world_size: the number of ranks that resume.
        case: the case, for the message.

    Raises:
        AssertionError: the resumed run differs, or an error ends it.
        Inconclusive: runs without a stop differ, too: the training depends on the number of ranks.
    """
    __tracebackhide__ = True
    saved = len(straight)
    own = world.run(straight_run, start, plan, False, world_size=world_size)
    head = f"{who}: saved by {in_words(saved)} after step {plan.saved_after}, resumed on {world_size},"
    try:
        resumed = world.run(resumed_run, start, plan, None, [], world_size=world_size)
    except PdlcheckError as error:
        error.add_note(f"while check_resume resumed on {in_words(world_size)} what {in_words(saved)} saved")
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise failure(
            f"{head} a rank raises {type(error).__name__}: {first}",
            likely_cause=cause_in_error(error, plan, saved, world_size),
            case=case,
        ) from error
    trouble = first_far(resumed, own, straight)
    if trouble is None:
        return
    unlike = _unlike(own, straight)
    if unlike is not None:
        rank, name = unlike
        raise Inconclusive(
            f"{head} rank {trouble.rank} differs in {trouble.name} from a run without a stop; but of two runs without "
            f"a stop, that of {in_words(saved)} holds nothing like {name} of rank {rank} of {world_size}: the training "
            "depends on the number of ranks, there is nothing to compare. Use the same initial weights, the same "
            "global batches and no dropout with any number of ranks; check_world_size_does_not_matter checks this"
        )
    heals = partial(_heals, start, plan, world, own, straight)
    if trouble.taken == 0:
        cause = cause_in_weights(start, plan, world, (resumed, own, straight), trouble.rank, trouble.name)
        evidence = None
    else:
        cause, evidence = cause_in_parts(start, plan, world, (resumed, own, straight), heals)
    _raise(head, trouble, plan, resumed, own, likely_cause=cause, evidence=evidence, case=case)


def first_far(found: Sequence[Trace], own: Sequence[Trace], straight: Sequence[Trace]) -> Trouble | None:
    """Return the first tensor that is farther from that of ``own`` than rounding explains; None if there is none."""
    for taken in range(len(own[0].states)):
        for rank, (mine, wanted) in enumerate(zip(found, own, strict=True)):
            for name in dict.fromkeys([*wanted.states[taken], *mine.states[taken]]):
                one, goal = mine.states[taken].get(name), wanted.states[taken].get(name)
                if one is None and goal is None:
                    continue
                if one is None or goal is None or (one.shape, one.dtype) != (goal.shape, goal.dtype):
                    return Trouble(taken, rank, name, None)
                off = distance(one, goal)
                if not off.numel() or float(off.max()) <= _rounding(goal):
                    continue
                far, moved = _spread(own, straight, taken, rank, name), _moved(own[rank], taken, name)
                allowed = _rounding(goal) + _OF_MOVED * moved
                if far <= _rounding(goal) + _MOST_SPREAD * moved:
                    allowed += _SPREADS * far
                if float(off.max()) > allowed:
                    return Trouble(taken, rank, name, off > allowed)
    return None


def _heals(
    start: Start, plan: Plan, world: Any, own: Sequence[Trace], straight: Sequence[Trace], left: Any, names: list[str]
) -> bool:
    """Return whether the resumed run is right with the named states put back."""
    try:
        again = world.run(resumed_run, start, plan, left, names, world_size=len(own))
    except Exception:  # a state may not fit into an object that load has made otherwise
        return False
    return first_far(again, own, straight) is None


def _rounding(goal: Tensor) -> float:
    """Return how far numbers of this size and dtype round, over a few steps."""
    finite = goal[goal.isfinite()].abs()
    relative = (RELATIVE | NARROW).get(goal.dtype.to_real() if goal.is_complex() else goal.dtype, 0.0)
    return relative * float(finite.max()) if finite.numel() else 0.0


def _moved(trace: Trace, taken: int, name: str) -> float:
    """Return the largest distance that an element has gone since the save."""
    before, after = trace.states[0].get(name), trace.states[taken].get(name)
    if before is None or after is None or before.shape != after.shape or not after.numel():
        return 0.0
    return float(distance(after, before).max())


def _unlike(own: Sequence[Trace], straight: Sequence[Trace]) -> tuple[int, str] | None:
    """Return the first rank and tensor of ``own`` that the other run without a stop does not hold; None if all are."""
    last = len(own[0].states) - 1
    for taken in (0, last):
        for rank, trace in enumerate(own):
            for name, goal in trace.states[taken].items():
                if goal is None or not goal.numel():
                    continue
                most = _rounding(goal) + _MOST_SPREAD * _moved(trace, last, name)
                if _spread(own, straight, taken, rank, name) > most:
                    return rank, name
    return None


def _spread(own: Sequence[Trace], straight: Sequence[Trace], taken: int, rank: int, name: str) -> float:
    """Return how far the nearest tensor of the other run without a stop is; inf if none has the shape.

    It is a whole tensor of any rank, under any name, or the shards of this name, joined over the ranks.
    """
    goal = own[rank].states[taken][name]
    assert goal is not None
    others = [trace.states[taken] for trace in straight]
    alike = [one for state in others for one in state.values() if one is not None and one.shape == goal.shape]
    far = min((float(distance(one, goal).max()) for one in alike if one.numel()), default=torch.inf)
    if far <= _rounding(goal):
        return far
    mine = [trace.states[taken] for trace in own]
    return min([far, *(_apart(_joined(mine, name, dim), _joined(others, name, dim), dim) for dim in range(goal.dim()))])


def _joined(states: Sequence[State], name: str, dim: int) -> Tensor | None:
    """Return the tensors of one name, joined along ``dim``; None if a rank has none, or they do not fit."""
    held = [state.get(name) for state in states]
    tensors = [one for one in held if one is not None and one.dim() > dim]
    if len(tensors) < len(held):
        return None
    rests = {(*one.shape[:dim], *one.shape[dim + 1 :]) for one in tensors}
    return torch.cat(tensors, dim) if len(rests) == 1 else None


def _apart(one: Tensor | None, other: Tensor | None, dim: int) -> float:
    """Return the largest distance; the longer one may end with zeros, as padding."""
    if one is None or other is None or one.dim() != other.dim():
        return torch.inf
    both = min(one.shape[dim], other.shape[dim])
    cut = [each.narrow(dim, 0, both) for each in (one, other)]
    rest = [each.narrow(dim, both, each.shape[dim] - both) for each in (one, other)]
    if cut[0].shape != cut[1].shape or not cut[0].numel() or any(bool(each.any()) for each in rest):
        return torch.inf
    return float(distance(*cut).max())


def _raise(
    head: str, trouble: Trouble, plan: Plan, resumed: Sequence[Trace], own: Sequence[Trace], **more: object
) -> None:
    __tracebackhide__ = True
    taken, rank, name = trouble.taken, trouble.rank, trouble.name
    when = "before a step was taken" if taken == 0 else f"after step {plan.saved_after + taken}"
    found, expected = (traces[rank].states[taken].get(name) for traces in (resumed, own))
    what = f"{head} rank {rank} {when} holds"
    place = Place(rank, tensor=name, step=plan.saved_after + taken)
    if found is None or expected is None or trouble.wrong is None:
        texts = ["nothing" if one is None else f"shape {tuple(one.shape)} and {one.dtype}" for one in (found, expected)]
        raise failure(f"{what} {texts[0]} as {name}, without a stop {texts[1]}", place, **more)
    at = first_index(trouble.wrong)
    place = Place(rank, name, at, found[at], expected[at], plan.saved_after + taken)
    raise failure(f"{what} {show(found[at])} at {at} of {name}, without a stop {show(expected[at])}", place, **more)
