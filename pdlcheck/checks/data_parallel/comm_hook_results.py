"""The gradients that ranks hold under a communication hook, compared with the gradients that they gave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Diagnosis, explain, predictions
from pdlcheck.checks.message import Place, failure, first_index, show
from pdlcheck.checks.state import State
from pdlcheck.checks.tolerances import Tolerance

__all__ = ["Given", "Results"]

Given = list[list[list[Tensor | None]]]  # by rank, step, parameter


@dataclass(frozen=True)
class Results:
    """The gradients that all ranks hold after each step, and the gradients that each rank gave."""

    who: str
    given: Given
    found: list[State]
    facts: str

    @property
    def names(self) -> list[str]:
        """Return the names of the gradients."""
        return list(self.found[0])

    def mean(self, step: int, place: int) -> Tensor | None:
        """Return the mean of the ranks' gradients in float64; None if no rank has one.

        A rank without a gradient counts as zero.
        """
        own = [rank[step][place] for rank in self.given]
        there = [grad.double() for grad in own if grad is not None]
        return torch.stack(there).sum(0) / len(own) if there else None

    def scale(self, step: int, place: int) -> float:
        """Return the magnitude of the largest element that any rank gave."""
        own = [rank[step][place] for rank in self.given]
        return max((float(grad.abs().max()) for grad in own if grad is not None), default=0.0)

    def applied(self, step: int, place: int) -> Tensor:
        """Return the gradient that the ranks hold, in float64.

        None counts as zero, and so does a gradient that no rank gave.
        """
        held = self.found[step][self.names[place]]
        if held is None or self.mean(step, place) is None:
            like = next(g for rank in self.given for s in rank if (g := s[place]) is not None)
            return torch.zeros_like(like, dtype=torch.float64)
        return held.double()

    def _eps(self, name: str) -> float:
        return torch.finfo(next(h.dtype for state in self.found if (h := state[name]) is not None)).eps

    def finite(self) -> None:
        """Check that every gradient is finite."""
        __tracebackhide__ = True
        for step, state in enumerate(self.found):
            for name, held in state.items():
                if held is not None and not held.isfinite().all():
                    at = first_index(~held.isfinite())
                    raise failure(
                        f"{self.who}: after step {step + 1} every rank holds {show(held[at])} at {at} of {name}, "
                        "all ranks gave finite numbers",
                        likely_cause="numbers overflow in the narrow dtype, or a division by zero",
                        case=self.facts,
                    )

    def near(self, relative: float) -> None:
        """Check that the gradients of the last quarter of the steps are the mean, up to ``relative``."""
        __tracebackhide__ = True
        steps = range(len(self.found) - max(1, len(self.found) // 4), len(self.found))
        for step in steps:
            for place, name in enumerate(self.names):
                mean = self.mean(step, place)
                if mean is None:
                    continue
                held = self.applied(step, place)
                allowed = relative * self.scale(step, place)
                wrong = ~((held - mean).abs() <= allowed)
                if wrong.any():
                    at = first_index(wrong)
                    raise failure(
                        f"{self.who}: after step {step + 1} every rank holds {show(held[at])} at {at} of {name}, "
                        f"the mean over ranks is {show(mean[at])}",
                        Place(None, name, at, held[at], mean[at], step + 1),
                        contributions=", ".join(
                            f"rank {r}: {'None' if g is None else show(g[at])}"
                            for r, g in enumerate(rank[step][place] for rank in self.given)
                        ),
                        allowed_error=f"{allowed:.3g}, {relative:.3g} of the largest gradient element",
                        likely_cause=self._diagnose(held, mean, step, place, allowed),
                        case=self.facts,
                    )

    def _diagnose(self, held: Tensor, mean: Tensor, step: int, place: int, allowed: float) -> Diagnosis:
        """Return the causes that explain the result far better than the mean does.

        The tolerance alone is not enough: if it is large, many candidates are within it.
        """
        causes = predictions(self._wrong_results(mean, step, place))
        return explain(held, causes, tolerance=Tolerance(absolute=allowed * len(self.given)), expected=mean)

    def _wrong_results(self, mean: Tensor, step: int, place: int) -> Iterator[tuple[str, Tensor]]:
        n = len(self.given)
        yield f"it is world_size = {n} times too large: summed, not averaged", mean * n
        yield f"it is world_size = {n} times too small: divided twice", mean / n
        yield "it is zero: the gradient was lost", torch.zeros_like(mean)
        for rank, own in enumerate(self.given):
            grad = own[step][place]
            if grad is not None:
                yield f"it is the gradient of rank {rank}: never reduced", grad.double()
        if step and (before := self.mean(step - 1, place)) is not None:
            yield "it is the mean of the step before: a buffer was sent before it was filled", before

    def first(self, steps: int) -> Results:
        """Return the results of the first ``steps`` steps."""
        return replace(self, given=[rank[:steps] for rank in self.given], found=self.found[:steps])

    def _errors(self, place: int) -> list[Tensor]:
        """Return the sum of the applied gradients minus the sum of the means, after each step."""
        total, errors = 0.0 * self.applied(0, place), []
        for step in range(len(self.found)):
            mean = self.mean(step, place)
            total = total + self.applied(step, place) - (0.0 if mean is None else mean)
            errors.append(total)
        return errors

    def _rounding(self, place: int) -> float:
        """Return the rounding error of the sum of the applied gradients, if every step rounds in the same direction."""
        scale = max(self.scale(step, place) for step in range(len(self.found)))
        numel = self.applied(0, place).numel()
        return self._eps(self.names[place]) * scale * float(numel**0.5) * len(self.found)

    def stays(self) -> Iterator[bool]:
        """Yield, for each parameter, whether a large error remains after the last step.

        An error is large if it is more than an eighth of the largest one on the way, and more than the rounding.
        """
        for place in range(len(self.names)):
            off = [float(error.norm()) for error in self._errors(place)]
            yield not off[-1] <= max(max(off) / 8, self._rounding(place))

    def bounded(self) -> None:
        """Check that the error does not grow over steps that all have the same gradients."""
        __tracebackhide__ = True
        half = len(self.found) // 2
        for place, name in enumerate(self.names):
            errors = self._errors(place)
            off = [float(error.norm()) for error in errors]
            if not max(off) <= self._rounding(place) and _grows(off):
                raise failure(
                    f"{self.who}: after {len(off)} steps the sum of what was applied to {name} is {off[-1]:.4g} off "
                    f"the sum of the means, after {half} steps {off[half - 1]:.4g}",
                    growth="every step had the same gradients: with error feedback, the error stops growing",
                    likely_cause=self._lost_by(place, (errors[-1] - errors[half - 1]) / (len(off) - half)),
                    case=self.facts,
                )

    def _lost_by(self, place: int, growth: Tensor) -> str:
        """Return why each step adds ``growth`` to the error.

        One rank is at fault if its gradients alone explain the growth.
        """
        own = [rank[0][place] for rank in self.given]
        mean = self.mean(0, place)
        if mean is not None and float((growth * mean).sum()) > 0:
            return "more is applied than was given: what has been sent must not be kept and sent again"
        ranks = []
        for rank, grad in enumerate(own) if growth.numel() > 1 else ():
            share = 0.0 if grad is None else grad.double() / len(own)
            apart = torch.minimum(growth.abs(), (growth + share).abs())
            ranks += [rank] if float(apart.norm()) <= 0.1 * float(growth.norm()) else []
        what = f"rank {ranks[0]} does not send" if len(ranks) == 1 else "is not sent"
        if any(self.mean(step, place) is None for step in range(len(self.found))):
            what += ", or is sent in a step in which no rank uses the parameter,"
        return (
            f"what {what} is lost: add it to the next gradient; or the sum does not fit the dtype in which it is sent"
        )

    def telescoping(self, residuals: list[dict[str, Tensor]]) -> None:
        """Check that the sum of the applied gradients plus the mean of the residuals is the sum of the means."""
        __tracebackhide__ = True
        for place, name in enumerate(self.names):
            bare = name.removeprefix("gradient of ").strip("'")
            zero = torch.zeros_like(self.applied(0, place))
            own = [one[bare].double() if bare in one else zero for one in residuals]
            kept = torch.stack(own).sum(0) / len(own)
            sums = [self.applied(step, place) for step in range(len(self.found))]
            means = [m for step in range(len(self.found)) if (m := self.mean(step, place)) is not None]
            found, expected = torch.stack(sums).sum(0) + kept, torch.stack(means).sum(0)
            # Each step rounds the applied gradient and the residual, once for each rank.
            scale = max(self.scale(step, place) for step in range(len(self.found)))
            allowed = len(sums) * len(residuals) * len(sums) * self._eps(name) * scale
            wrong = ~((found - expected).abs() <= allowed)
            if wrong.any():
                at = first_index(wrong)
                raise failure(
                    f"{self.who}: what was applied to {name} in {len(sums)} steps, plus the mean of what the ranks "
                    f"hold back, is {show(found[at])} at {at}; the sum of the means is {show(expected[at])}",
                    applied=show(torch.stack(sums).sum(0)[at]),
                    held_back=show(kept[at]),
                    likely_cause="the residual is not what was left out: scaled, of another parameter, or not added",
                    case=self.facts,
                )


def _grows(off: Sequence[float]) -> bool:
    """Return whether the root mean square of these errors grows about as much in each quarter.

    Random errors that stay bounded do not grow in this way.
    """
    length = len(off) // 4
    rms = [math.hypot(*off[start : start + length]) for start in range(0, 4 * length, length)]
    if not all(map(math.isfinite, rms)):
        return True
    return rms[3] > 1.2 * rms[2] > 1.44 * rms[1] and math.hypot(*rms[2:]) > 2.4 * math.hypot(*rms[:2])
