"""The causes that the steps of optimizers show: how many they took, with which settings and which gradients.

Weights hide much of this. Adam divides a gradient by its size, clipping by its norm, and momentum mixes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.evidence.exchanges import why_apart
from pdlcheck.checks.evidence.optimizers import GivenToOptimizer
from pdlcheck.checks.message import first_and_more
from pdlcheck.checks.trajectories.causes import Ways, causes_of_gradients
from pdlcheck.checks.trajectories.clipped import missing_from_norm
from pdlcheck.checks.trajectories.precision import Precision

__all__ = ["Given", "diagnose_steps", "hidden_factor"]

_ALONG = 1 - 1e-6  # the least cosine of gradients in one direction
_FACTOR = 1e-2  # the least distance of a factor from 1

Given = Mapping[str, GivenToOptimizer]


class _Steps(NamedTuple):
    """The optimizer steps of a wrong training and of the right one.

    Args:
        found: of the wrong rank.
        right: of the same rank in the right training.
        wrong: the parameters that are wrong.
        ways: how they went.
    """

    found: Given
    right: Given
    wrong: Sequence[str]
    ways: Ways

    def agrees(self, name: str) -> bool:
        """Return whether the last gradient of a parameter is right, up to the rounding of the precision."""
        if not (self.found[name].is_torchs and self.right[name].is_torchs):
            return False  # unknown
        ours, theirs = self.found[name].gradient, self.right[name].gradient
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return not _is_nonzero(ours) and not _is_nonzero(theirs)
        off = float((ours.double() - theirs.double()).norm())
        return off <= max(1e-9, self.ways.precision.of_the_way) * float(theirs.double().norm())


def diagnose_steps(ways: Ways, ranks: Sequence[Given], rank: int, right: Given, before: Given) -> Diagnosis:
    """Return the causes that the optimizers' steps prove, and other differences as hints.

    Args:
        ways: how the wrong weights of a rank went.
        ranks: what the optimizers of every rank were given.
        rank: the wrong rank.
        right: what the optimizers of this rank were given in the right training.
        before: what they were given in the right training of one step less; empty if there is none.
    """
    found, wrong = ranks[rank], [name for name in ways.wrong if name in right]
    if not wrong or not found or len(wrong) < len(ways.wrong):
        return Diagnosis()
    absent = [name for name in wrong if name not in found]
    if absent:
        text = f"no optimizer of this training updates {first_and_more(absent)}, one of {ways.what} does"
        if len(absent) < len(wrong):
            return Diagnosis(hints=(text,))
        return Diagnosis() if ways.went.any() else Diagnosis(fits=(text,))  # copies of them may be trained
    steps = _Steps(found, right, wrong, ways)
    hints = [Candidate[_Steps].when(text, True) for text in _differences(steps)] or [
        Candidate(
            "the last gradients and the settings that the optimizer got are right: something else changes weights, or "
            "the state of the optimizer",
            holds=lambda steps: all(map(steps.agrees, steps.wrong)),
        )
    ]
    return explain(
        steps,
        _of_counts(steps, ranks, rank),
        _of_ranks(steps, ranks),
        _of_settings(steps),
        _of_kept_gradients(steps, before),
        _of_gradients(steps),
        hints=hints,
    )


def _of_counts(steps: _Steps, ranks: Sequence[Given], rank: int) -> Iterator[Candidate[_Steps]]:
    if any(given[name].is_resumed for given in (steps.found, steps.right) for name in steps.wrong):
        return  # the steps before are unknown
    ours, theirs = (max(given[name].steps for name in steps.wrong) for given in (steps.found, steps.right))
    counts = [max((one.steps for one in given.values()), default=0) for given in ranks]
    where = "" if len(set(counts)) == 1 else f" on rank {rank} ({', '.join(map(str, counts))} on the ranks in order)"
    yield Candidate(
        f"the optimizer took {ours} steps{where}, that of {steps.ways.what} {theirs}: it steps in each micro-batch, or "
        "not in each batch, or one of the two skips a step",
        holds=lambda steps: all(steps.found[name].steps != steps.right[name].steps for name in steps.wrong),
        short="another number of optimizer steps",
    )


def _of_ranks(steps: _Steps, ranks: Sequence[Given]) -> Iterator[Candidate[_Steps]]:
    """Yield a cause if the ranks hold different weights and their optimizers were given different gradients."""
    if steps.ways.apart is None:
        return
    names = [name for name in steps.found if any(_differ(given.get(name), ranks[0].get(name)) for given in ranks)]
    why = _of_exchanges(ranks, names[0], steps.ways.world_size) if names else None
    yield Candidate(
        f"ranks went apart: their optimizers got different gradients of {first_and_more(names)}"
        + (f"; {why}" if why else ", which were not synchronised, or only before their last change"),
        holds=lambda steps: bool(names) and set(names) <= set(steps.wrong),
        short="gradients that differ between ranks",
    )


def _of_exchanges(ranks: Sequence[Given], name: str, world_size: int) -> str | None:
    """Return why the gradients of a parameter differ if what the ranks exchanged shows it."""
    own = [given[name].exchanges for given in ranks if name in given]
    if len(own) < world_size or not all(own):
        return None
    now, before = [one[0] for one in own], [one[1] for one in own if len(one) > 1]
    lacking = {other: one.elements for other, one in ranks[0].items() if one.gradient is None}
    step = ranks[0][name].steps
    return why_apart(f"step {step}", now, f"step {step - 1}", before, lacking)


def _of_settings(steps: _Steps) -> Iterator[Candidate[_Steps]]:
    are_right = all(map(steps.agrees, steps.wrong))
    for text in _differences(steps):
        yield Candidate.when(f"the gradients are right, and {text}", are_right)


def _of_kept_gradients(steps: _Steps, before: Given) -> Iterator[Candidate[_Steps]]:
    """Yield a cause if the gradients of the step before count again."""
    if not before or any(name not in before or not before[name].is_torchs for name in steps.wrong):
        return

    def are_added(steps: _Steps) -> bool:
        sides = (steps.found, steps.right, before)
        columns = [[side[name].gradient for side in sides] for name in steps.wrong]
        if any(one is None or one.shape != column[0].shape for column in columns for one in column):  # type: ignore[union-attr]
            return False
        ours, theirs, old = (torch.cat([_flat(one) for one in side]) for side in zip(*columns, strict=True))
        return float((ours - theirs - old).norm()) <= max(1e-6, steps.ways.precision.of_the_way) * float(old.norm())

    step = steps.right[steps.wrong[0]].steps
    yield Candidate(
        f"the gradients of step {step} are the right ones and those of step {step - 1} again: no zero_grad() comes "
        "between the two steps, or it clears other tensors",
        holds=lambda steps: steps.ways.apart is None and are_added(steps),
        short="gradients that are not zeroed",
    )


def _of_gradients(steps: _Steps) -> Iterator[Candidate[_Steps]]:
    """Yield the causes of wrong gradients, if the optimizers do the same with them."""
    needed = [name for name in steps.wrong if _is_nonzero(steps.right[name].gradient)]
    without = [name for name in needed if steps.found[name].gradient is None]
    if without:
        names = first_and_more(without)
        text = f"the optimizer got no gradient of {names} (.grad is None): frozen, not used, or cleared too early"
        yield Candidate(text, holds=lambda steps: len(without) == len(steps.wrong), short="no gradient")
    if steps.ways.apart is None and not _differences(steps):
        ways = steps.ways
        lacking = _missing_from_norm(steps)
        if lacking is not None:
            yield Candidate.when(lacking, True)
            return
        gradients = _gradients(steps.found, steps.right, steps.wrong, ways.precision, ways.world_size, ways.what)
        if gradients is not None:
            gradients = gradients._replace(learned=ways.learned)
            for one in causes_of_gradients(gradients):
                holds = one.holds is not None and one.holds(gradients)
                yield Candidate(one.text, holds=lambda _, holds=holds: holds, short=one.short)  # type: ignore[misc]


def _missing_from_norm(steps: _Steps) -> str | None:
    """Return which gradients are missing from the norm that clips, if all of them are known."""
    if not all(steps.found[name].is_torchs and steps.right[name].is_torchs for name in steps.wrong):
        return None
    found, right = (
        {name: given[name].gradient for name in steps.wrong if given[name].gradient is not None}
        for given in (steps.found, steps.right)
    )
    if found.keys() != right.keys() or any(found[name].shape != goal.shape for name, goal in right.items()):  # type: ignore[union-attr]
        return None
    return missing_from_norm(found, right, steps.ways.what)  # type: ignore[arg-type]


def hidden_factor(found: Given, right: Given, precision: Precision, world_size: int, what: str) -> Diagnosis | None:
    """Return the causes of a common factor of all gradients where the weights are right; None if there is none.

    Adam divides the gradients by their size, and so hides it, until clipping, ``eps`` or another optimizer shows it.

    Args:
        found: what the optimizers of a rank were given.
        right: what they were given in the right training.
        precision: of the trainings.
        world_size: number of ranks.
        what: the name of the right training.
    """
    alike = found.keys() == right.keys() and all(found[name].steps == right[name].steps for name in right)
    gradients = _gradients(found, right, list(right), precision, world_size, what) if alike else None
    if gradients is None or gradients.cosine < _ALONG or abs(gradients.times - 1) < _FACTOR:
        return None
    if _differences(_Steps(found, right, list(right), gradients)):
        return None
    return explain(gradients, causes_of_gradients(gradients))


def _gradients(
    found: Given, right: Given, names: Sequence[str], precision: Precision, world_size: int, what: str
) -> Ways | None:
    """Return the last gradients; None if one of them is unknown or has another shape, or all of them are 0."""
    both = [(found[name], right[name]) for name in names]
    if not all(given.is_torchs for pair in both for given in pair):
        return None
    pairs = [(ours.gradient, theirs.gradient) for ours, theirs in both]
    pairs = [pair for pair in pairs if pair[0] is not None or pair[1] is not None]
    if not pairs or any(ours is None or theirs is None or ours.shape != theirs.shape for ours, theirs in pairs):
        return None
    went, goal = (torch.cat([_flat(one) for one in side]) for side in zip(*pairs, strict=True))
    if not goal.any() or not went.any():
        return None
    return Ways(goal, went, precision, world_size, None, False, what, names, names, of_gradients=True)


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def _differences(steps: _Steps) -> list[str]:
    """Return how the optimizer and its first settings differ from those of the right training."""
    for name in steps.wrong:
        ours, theirs = steps.found[name], steps.right[name]
        if ours.optimizer != theirs.optimizer:
            return [f"the optimizer is {ours.optimizer}, that of {steps.ways.what} {theirs.optimizer}"]
        for step, (mine, goal) in enumerate(zip(ours.settings, theirs.settings, strict=False), start=1):
            for key in sorted(mine.keys() & goal.keys(), key=lambda key: (key != "lr", key)):
                if not _is_same(mine[key], goal[key]):
                    text = f"the optimizer has {key}={_shown(mine[key])} for {name} in its step {step}"
                    return [f"{text}, that of {steps.ways.what} {key}={_shown(goal[key])}"]
    return []


def _differ(one: GivenToOptimizer | None, other: GivenToOptimizer | None) -> bool:
    ours, theirs = (given.gradient if given is not None else None for given in (one, other))
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return _is_nonzero(ours) or _is_nonzero(theirs)
    return float((ours - theirs).abs().max()) > 1e-6 * float(theirs.abs().max()) if ours.numel() else False


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        return abs(ours - theirs) <= 1e-9 * max(abs(ours), abs(theirs))
    return type(ours) is not type(theirs) or bool(ours == theirs)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
