"""The check of non-finite gradients, on one rank or on all: every rank must treat them in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdlcheck.checks.message import failure, show
from pdlcheck.errors import CheckFailed, Deadlock

__all__ = ["Clipped", "Given", "require_one_verdict"]

Given = Sequence[Sequence[Tensor | None]]
Place = tuple[int, int]  # a rank, and the position of a gradient on it


@dataclass(frozen=True)
class Clipped:
    """The gradients of a rank after clipping, the norm that ``clip`` returned, and the error if it raised one."""

    gradients: list[Tensor | None]
    norm: float | None
    error: str | None = None


def require_one_verdict(
    who: str, run: Callable[[Given], list[Clipped]], gradients: Given, counted: Sequence[Sequence[bool]], facts: str
) -> None:
    """Check that all ranks act alike if a gradient of one rank, or of each rank, begins with inf or NaN.

    They may raise, remove what is not finite, or scale by 0, by NaN, or not at all. The user chooses which.

    Args:
        who: the name of the subject, for the message.
        run: clips the given gradients on the ranks; returns an error as part of the result.
        gradients: of each rank, as in ``check_clip_grad_norm``.
        counted: for each rank and gradient, whether it counts.
        facts: the case.

    Raises:
        AssertionError: a rank raises or waits alone; ranks return different norms; a returned norm is finite though
            gradients are not; or ranks scale by different factors.
    """
    __tracebackhide__ = True
    for places in _sets_of_places(gradients, counted):
        for value in (math.inf, math.nan):
            given = [
                [_with_first(grad, value) if (rank, at) in places else grad for at, grad in enumerate(own)]
                for rank, own in enumerate(gradients)
            ]
            _require_agreement(_Case(who, given, places, value, facts), run)


@dataclass(frozen=True)
class _Case:
    """The gradients of all ranks, of which those at ``places`` begin with ``value``."""

    who: str
    given: Given
    places: frozenset[Place]
    value: float
    facts: str

    @property
    def told(self) -> str:
        ranks = sorted({rank for rank, _ in self.places})
        return f"{show(self.value)} in gradients of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    def failure(self, headline: str, cause: str, **more: str) -> CheckFailed:
        return failure(f"{self.who}: {headline}", not_finite=self.told, **more, likely_cause=cause, case=self.facts)


def _require_agreement(case: _Case, run: Callable[[Given], list[Clipped]]) -> None:
    __tracebackhide__ = True
    try:
        ranks = run(case.given)
    except Deadlock as error:
        raise case.failure(
            "a rank is left waiting where gradients are not finite",
            "a rank whose own gradients are not finite leaves before the norms are combined",
            ranks="; ".join(error.ranks),
        ) from error
    raising = [rank for rank, held in enumerate(ranks) if held.error is not None]
    if len(raising) == len(ranks):
        return
    if raising:
        others = next(rank for rank in range(len(ranks)) if rank not in raising)
        raise case.failure(
            f"rank {raising[0]} raises {ranks[raising[0]].error}, rank {others} goes on",
            "each rank asks whether its own norm is finite: it must be that of all ranks",
        )
    _require_one_norm(case, ranks)
    _require_one_factor(case, ranks)


def _require_one_norm(case: _Case, ranks: Sequence[Clipped]) -> None:
    __tracebackhide__ = True
    told = [(rank, held.norm) for rank, held in enumerate(ranks) if held.norm is not None]
    for rank, norm in told:
        first, other = told[0]
        if norm != other and not (math.isnan(norm) and math.isnan(other)):
            raise case.failure(
                f"rank {rank} returns {show(norm)}, rank {first} returns {show(other)}",
                "ranks combine their norms in different ways, or not at all: where one skips the step, others take it",
            )
    left = next((rank for rank, held in enumerate(ranks) if any(map(_not_finite, held.gradients))), None)
    if told and left is not None and math.isfinite(norm := told[0][1]) and norm >= 0:  # a negative norm marks overflow
        raise case.failure(
            f"rank {told[0][0]} returns {show(norm)}, gradients of rank {left} are not finite",
            "it was lost where norms were combined, as max() and ReduceOp.MAX may drop NaN: who asks the norm steps",
        )


def _require_one_factor(case: _Case, ranks: Sequence[Clipped]) -> None:
    """Check that all ranks scale or remove the finite gradients in the same way.

    Non-finite gradients may be removed in addition.
    """
    __tracebackhide__ = True
    done = [
        _Done(rank, at, given, found)
        for rank, held in enumerate(ranks)
        for at, (given, found) in enumerate(zip(case.given[rank], held.gradients, strict=True))
        if given is not None and (torch.isfinite(given) & (given != 0)).any()
    ]
    done = [one for one in done if (one.rank, one.at) not in case.places or one.factor]
    surest = min(done, key=lambda one: one.uncertain, default=None)
    for one in done:
        if surest is not None and not one.is_as(surest.factor):
            raise case.failure(
                f"rank {one.rank} {one.told} gradient {one.at}, rank {surest.rank} {surest.told} its gradient "
                f"{surest.at}",
                "each rank goes by its own gradients: what is done must follow from the norm of all ranks",
            )


class _Done:
    """The change of the largest finite element of a gradient: a factor, or None if the gradient was removed."""

    def __init__(self, rank: int, at: int, given: Tensor, found: Tensor | None) -> None:
        self.rank, self.at, self._limits = rank, at, torch.finfo(given.dtype)
        flat = given.flatten()
        place = int(torch.where(torch.isfinite(flat), flat.abs(), 0).argmax())
        self._given = abs(flat[place].item())
        self._found = None if found is None else abs(found.flatten()[place].item())

    @property
    def factor(self) -> float | None:
        return None if self._found is None else self._found / self._given

    @property
    def uncertain(self) -> tuple[float, float]:
        """Return a sort key that is smaller the less the factor is rounded."""
        return self._limits.eps, -self._given

    def is_as(self, factor: float | None) -> bool:
        if factor is None or self._found is None:
            return factor is self._found
        if math.isfinite(factor) and math.isfinite(self._found):
            expected = self._given * factor
            return abs(self._found - expected) <= 8 * self._limits.eps * expected + self._limits.smallest_normal
        return math.isnan(factor) == math.isnan(self._found) and math.isinf(factor) == math.isinf(self._found)

    @property
    def told(self) -> str:
        if self.factor is None:
            return "removes"
        return "leaves" if self.factor == 1 else f"multiplies by {self.factor:.6g}"


def _sets_of_places(gradients: Given, counted: Sequence[Sequence[bool]]) -> Iterator[frozenset[Place]]:
    """Yield the sets of gradients to make non-finite: one gradient of one rank, then one of each rank.

    Each set includes the copies of its gradients. If the copies are unknown, the only set has all gradients.
    """
    filled = {
        (rank, at): grad
        for rank, own in enumerate(gradients)
        for at, grad in enumerate(own)
        if grad is not None and grad.numel()
    }
    counting = [place for place in filled if counted[place[0]][place[1]]]
    copies = {
        place: [one for one in counting if _equal(filled[place], filled[one])]
        for place in filled
        if place not in counting
    }
    known = all(copies.values())

    def with_copies(places: list[Place]) -> frozenset[Place]:
        return frozenset([*places, *(copy for copy, of in copies.items() if set(of) & set(places))])

    last_of_ranks = dict(counting)
    one = with_copies([(max(last_of_ranks), last_of_ranks[max(last_of_ranks)])])
    each = with_copies(list(last_of_ranks.items()))
    yield from dict.fromkeys([one, each] if known else [frozenset(filled)])


def _with_first(grad: Tensor | None, value: float) -> Tensor | None:
    if grad is None:
        return None
    spoilt = grad.clone()
    spoilt[(0,) * grad.dim()] = value
    return spoilt


def _not_finite(grad: Tensor | None) -> bool:
    return grad is not None and not bool(torch.isfinite(grad).all())


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
