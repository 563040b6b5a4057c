"""The rule of a loss scaler in plain Python, and the results that the usual mistakes lead to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.tolerances import Tolerance

__all__ = ["Rule", "Taken", "scale_cause", "weights_cause"]


@dataclass(frozen=True)
class Rule:
    """The rule by which a loss scaler changes its scale."""

    scale: float
    growth: float
    backoff: float
    interval: int

    def scales(self, skipped: Sequence[bool]) -> list[float]:
        """Return the scale at the start and after each step. ``skipped`` marks the skipped steps."""
        found, calm = [self.scale], 0
        for skip in skipped:
            calm = 0 if skip else calm + 1
            grows = calm == self.interval
            found.append(found[-1] * (self.backoff if skip else self.growth if grows else 1.0))
            calm = 0 if grows else calm
        return found


@dataclass(frozen=True)
class Taken:
    """One step of all ranks.

    Args:
        overflowing: the ranks with a gradient that overflows.
        gradients: of each rank, unscaled, with the overflow; None if a rank has none.
        mean: whether ranks step with the mean of their gradients.
        scale: before the step.
        lr: of SGD.
        before: the weights of each rank before the step.
        found: the weights of each rank after the step.
        expected: the weights that one process has after the step.
        max_norm: limit for the norm of the gradients in the step; None if they are not clipped.
        sort: the value that gradients overflow to. The check examines inf, NaN and -inf, in this order.
    """

    overflowing: list[int]
    gradients: list[Tensor | None]
    mean: bool
    scale: float
    lr: float
    before: list[Tensor]
    found: list[Tensor]
    expected: list[Tensor]
    max_norm: float | None = None
    sort: float = math.inf

    @property
    def happened(self) -> str:
        """Return a description of the step, and of the right reaction."""
        if not self.overflowing:
            return "no gradient overflows, so every rank must step"
        to = "" if self.sort == math.inf else f" to {self.sort_name}"
        return f"the gradients of ranks {self.overflowing} overflow{to}, so no rank may step"

    @property
    def sort_name(self) -> str:
        """Return the overflow value as text."""
        return "NaN" if math.isnan(self.sort) else f"{self.sort:g}"

    def near(self, found: Tensor, expected: Tensor) -> Tensor:
        """Return a mask of the weights that are equal up to rounding.

        Clipped steps are not whole numbers and may end near 0, so they get an absolute tolerance.
        """
        return torch.isclose(found, expected, rtol=1e-5, atol=0.0 if self.max_norm is None else 1e-5)

    @property
    def wrong(self) -> list[int]:
        """Return the ranks whose weights differ from those of one process."""
        pairs = enumerate(zip(self.found, self.expected, strict=True))
        return [rank for rank, pair in pairs if not self.near(*pair).all()]

    def after(
        self,
        rank: int,
        gradients: list[Tensor | None],
        factor: float = 1.0,
        *,
        of_norm: float = 1.0,
        alone: bool = False,
        clips: bool = True,
    ) -> Tensor:
        """Return the weights of ``rank`` after a step with these gradients.

        Args:
            rank: the rank that steps.
            gradients: the unscaled gradient of each rank.
            factor: a factor of the gradients, applied before clipping.
            of_norm: a factor of the norm that is used for clipping.
            alone: clip by the norm of the rank alone.
            clips: False for a step without clipping.
        """
        own = gradients[rank]
        if own is None:
            return self.before[rank]
        present = [grad for grad in gradients if grad is not None]
        if self.mean:
            own = torch.stack(present).mean(0)
        if self.max_norm is not None and clips:
            counted = own if alone or self.mean else torch.cat(present)
            norm = counted.norm() * factor * of_norm
            factor *= float((self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        return self.before[rank] - self.lr * factor * own


def weights_cause(step: Taken) -> Diagnosis:
    """Return every known mistake that leads to exactly the weights of the ranks."""
    mistakes = _of_a_step_to_skip(step) if step.overflowing else _of_a_step_to_take(step)

    def leads_there(left: dict[int, Tensor], step: Taken) -> bool:
        near = Tolerance(relative=1e-6)
        return all(bool(near.accepts(step.found[rank], left[rank]).all()) for rank in left)

    return explain(step, [Candidate(text, holds=partial(leads_there, left)) for text, left in mistakes])


def _of_a_step_to_skip(step: Taken) -> Iterator[tuple[str, dict[int, Tensor]]]:
    ranks = range(len(step.found))
    as_they_are = {rank: step.after(rank, step.gradients) for rank in ranks}
    finite = [None if grad is None else grad.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for grad in step.gradients]
    yield (
        "the scaler of a rank sees the gradients of that rank alone: found_inf must be reduced over ranks",
        as_they_are | {rank: step.before[rank] for rank in step.overflowing},
    )
    lost = f"the overflow on ranks {step.overflowing} was lost, found_inf must be the maximum over ranks"
    if step.sort != math.inf:
        seen = "inf" if math.isnan(step.sort) else "inf and NaN"
        lost = f"a scaler that sees {seen} does not see {step.sort_name}, look for all that is not finite"
    yield f"every rank stepped with gradients as they are: {lost}", as_they_are
    yield (
        f"what overflows on ranks {step.overflowing} was replaced with 0 before the scaler looked for it",
        {rank: step.after(rank, finite) for rank in ranks},
    )


def _of_a_step_to_take(step: Taken) -> Iterator[tuple[str, dict[int, Tensor]]]:
    wrong, world_size = step.wrong, len(step.found)

    def scaled(factor: float) -> dict[int, Tensor]:
        return {rank: step.after(rank, step.gradients, factor) for rank in wrong}

    yield f"ranks {wrong} did not step", {rank: step.before[rank] for rank in wrong}
    yield (
        f"ranks {wrong} stepped with the gradient times the scale: it was not unscaled, or the loss was scaled twice",
        scaled(step.scale),
    )
    yield (
        f"ranks {wrong} stepped with the gradient by the scale: it was unscaled twice, or the loss was not scaled",
        scaled(1 / step.scale),
    )
    if step.mean:
        yield "gradients were added over ranks, not averaged", scaled(world_size)
        yield "the mean of the gradients was divided by world_size again", scaled(1 / world_size)
        own = {rank: step.before[rank] - step.lr * grad for rank, grad in enumerate(step.gradients) if grad is not None}
        yield "each rank stepped with the gradient of its own: they were not averaged", own
    if step.max_norm is not None:
        yield from _of_a_step_to_clip(step, step.max_norm)


def _of_a_step_to_clip(step: Taken, max_norm: float) -> Iterator[tuple[str, dict[int, Tensor]]]:
    wrong, world_size = step.wrong, len(step.found)

    def clipped(**keywords: Any) -> dict[int, Tensor]:
        return {rank: step.after(rank, step.gradients, **keywords) for rank in wrong}

    yield f"ranks {wrong} did not clip", clipped(clips=False)
    yield (
        f"ranks {wrong} clipped before they unscaled: by a norm that is the scale = {step.scale:g} times too large",
        clipped(of_norm=step.scale),
    )
    if step.mean:
        copies = "the gradients that every rank holds were counted on each of them in the norm"
        yield copies, clipped(of_norm=math.sqrt(world_size))
        lengths = [None if grad is None else float(grad.norm()) + 1e-6 for grad in step.gradients]
        each = [
            None if grad is None or length is None else grad * min(1.0, max_norm / length)
            for grad, length in zip(step.gradients, lengths, strict=True)
        ]
        alone = {rank: step.after(rank, each, clips=False) for rank in wrong}
        yield "each rank clipped the gradient of its own, before they were averaged", alone
    else:
        yield f"ranks {wrong} clipped by the norm of their own gradients, not by that of all ranks", clipped(alone=True)


def scale_cause(rule: Rule, overflows: Sequence[Sequence[int]], found: Sequence[Sequence[float]]) -> Diagnosis:
    """Return why scales are wrong after the last step.

    Args:
        rule: the rule of the scaler.
        overflows: for each step the ranks whose gradients overflow.
        found: the scales of each rank since the start.
    """
    alone = [rule.scales([rank in overflowing for overflowing in overflows]) for rank in range(len(found))]
    goal = rule.scales([bool(overflowing) for overflowing in overflows])
    wrong = [rank for rank, scales in enumerate(found) if not _near(scales, goal)]
    each = all(_near(scales, own) for scales, own in zip(found, alone, strict=True))
    still = (
        f"the scale of ranks {wrong} did not change in this step, it must be {goal[-1] / goal[-2]:g} times what it was"
    )
    own_counts = "ranks count overflows, or steps without one, each for itself: scales part from here on"
    return explain(
        found,
        [Candidate.when(own_counts, each)],
        [Candidate.when(still, all(found[rank][-1] == found[rank][-2] for rank in wrong))],
    )


def _near(found: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(found, expected, strict=True))
