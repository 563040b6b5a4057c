"""The check of gradient clipping over ranks.

The reference is one process that holds every gradient once, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import Place, case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.precision.clip_missing import parts_of
from pdlcheck.checks.precision.clip_nonfinite import Clipped, Given, require_one_verdict
from pdlcheck.errors import Deadlock, Inconclusive, PeerFailed

__all__ = ["check_clip_grad_norm"]


@takes_world
def check_clip_grad_norm(
    clip: Callable[[list[Tensor], float], Any],
    world: Any,
    *,
    gradients: Sequence[Sequence[Tensor | None]],
    max_norm: float,
    norm_type: float = 2.0,
    counted: Sequence[Sequence[bool]] | None = None,
) -> None:
    """Check that all ranks scale their gradients by the factor of one process that holds every gradient once.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)`` where that is below 1. The
    check computes the norm in float64. The norm may be off by the rounding of float32, or of the gradients' dtype if
    that is wider. A complex element counts by its absolute value, as in torch.

    Then the check calls ``clip`` with a ``max_norm`` on the other side of the norm. This is half of the smallest norm
    of a rank, or twice the norm of all gradients, which must scale nothing.

    Last, the check sets inf, and then NaN, in a gradient of one rank, and then in a gradient of each rank. All ranks
    must do the same: raise, as with ``error_if_nonfinite=True``, remove non-finite gradients, or scale all gradients by
    one factor. The norms that they return must be equal, and not finite while a gradient is not.

    Args:
        clip: called as ``clip(parameters, max_norm)`` on every rank, with parameters that carry their gradients; may
            return the norm.
        world: where the ranks run.
        gradients: of each rank; None for a parameter without one, an empty list for a rank without parameters.
        max_norm: the limit for the norm of all gradients.
        norm_type: the norm that ``clip`` uses.
        counted: for each rank and gradient, whether it counts; the default is all. If several ranks hold copies of a
            gradient, give True for one copy and False for the others.

    Raises:
        AssertionError: names rank, gradient, index and the likely cause: clipped by the norm of the rank alone,
            replicated gradients counted on every rank, or squares that overflow. A cause is named if it explains every
            gradient of the rank. Also raised if ranks act differently where a gradient is not finite.
        Inconclusive: all gradients are zero or None, or one is not finite.

    Example:
        >>> from pdlcheck.primitives import clip_grad_norm
        >>> from pdlcheck.worlds import get_world
        >>> def clip(parameters, max_norm):
        ...     return clip_grad_norm(parameters, max_norm, sharded=True)
        >>> gradients = [[torch.tensor([3.0])], [torch.tensor([4.0]), None]]
        >>> check_clip_grad_norm(clip, get_world("sim"), gradients=gradients, max_norm=1.0)
    """
    __tracebackhide__ = True
    for rank, own in enumerate(gradients):
        for one in own:
            if one is not None and not isinstance(one, Tensor):
                raise TypeError(
                    f"check_clip_grad_norm takes as gradients a list of tensors for each rank, rank {rank} has a "
                    f"{type(one).__name__}; call torch.tensor on it"
                )
    norms = _Norms(gradients, counted or [[True] * len(own) for own in gradients], norm_type)
    norm = norms.of_all()
    if not norm:
        raise Inconclusive(f"{name_of(clip)}: all gradients are zero, there is nothing to clip")
    if not math.isfinite(norm):
        raise Inconclusive(f"{name_of(clip)}: the norm of the gradients is {norm}, no factor brings it to {max_norm}")
    least = min(one for one in norms.of_ranks() if one)  # below it every rank must scale, whatever norm it uses
    other_side = (least / 2, "half of a rank's norm") if max_norm >= norm else (norm * 2, "twice the norm")
    for limit, why in ((max_norm, ""), other_side):
        ranks: list[Clipped] = world.run(_clip, clip, gradients, limit, world_size=len(gradients))
        shown = f"{show(limit)} ({why})" if why else limit
        facts = case(world, len(gradients), max_norm=shown, norm_type=norm_type)
        _require_clipped(name_of(clip), ranks, norms, limit, facts)
        _require_norm(name_of(clip), ranks, norms, limit, facts)

    def run(spoilt: Given) -> list[Clipped]:
        return list(world.run(_clip, clip, spoilt, max_norm, True, world_size=len(spoilt)))

    facts = case(world, len(gradients), max_norm=max_norm, norm_type=norm_type)
    require_one_verdict(name_of(clip), run, gradients, norms.counted, facts)


def _require_clipped(who: str, ranks: Sequence[Clipped], norms: _Norms, max_norm: float, facts: str) -> None:
    __tracebackhide__ = True
    factor = min(1.0, max_norm / (norms.of_all() + 1e-6))
    for rank, held in enumerate(ranks):
        for position, (given, found) in enumerate(zip(norms.gradients[rank], held.gradients, strict=True)):
            if given is None or found is None:
                if given is not found:
                    raise failure(f"{who}: rank {rank} has another gradient {position}: None", case=facts)
                continue
            expected = _wide(given) * factor
            rounded = (_rounding(given.dtype) + norms.rounding) * expected.abs()
            allowed = rounded + torch.finfo(given.dtype).smallest_normal
            wrong = ~((_wide(found) - expected).abs() <= allowed)
            if wrong.any():
                at = first_index(wrong)
                raise failure(
                    f"{who}: rank {rank} holds {show(found[at])} at {at} of gradient {position}, "
                    f"{show(expected[at])} is expected",
                    Place(rank, f"gradient {position}", at, found[at], expected[at]),
                    norms=norms.told(),
                    factor=f"{_wide(found)[at].item() / _wide(given)[at].item():.6g}, expected {factor:.6g}"
                    if given[at] != 0
                    else None,
                    likely_cause=norms.diagnose(held.gradients, rank, position, max_norm),
                    case=facts,
                )


def _require_norm(who: str, ranks: Sequence[Clipped], norms: _Norms, max_norm: float, facts: str) -> None:
    """Check the norm that ``clip`` returns, if it returns one."""
    __tracebackhide__ = True
    norm = norms.of_all()
    for rank, held in enumerate(ranks):
        if held.norm is None:
            continue
        if not abs(held.norm - norm) <= norms.rounding * norm:
            raise failure(
                f"{who}: rank {rank} returns {held.norm:.9g}, the norm of all gradients is {norm:.9g}",
                norms=norms.told(),
                likely_cause=norms.diagnose_norm(held.norm, rank, max_norm),
                case=facts,
            )
        if held.norm != ranks[0].norm:
            raise failure(
                f"{who}: rank {rank} returns {held.norm!r}, rank 0 returns {ranks[0].norm!r}",
                likely_cause="ranks add in different orders: what they decide by it may differ",
                case=facts,
            )


_NOT_CLIPPED = [("the gradients were not clipped on this rank", 1.0)]
_NOT_FINITE = [
    ("the gradients were multiplied by 0 on this rank", 0.0),
    ("the gradients were multiplied by inf on this rank, as where a norm of 0 divides", math.inf),
]


@dataclass(frozen=True)
class _Norms:
    """The norms of the ranks' gradients, in float64."""

    gradients: Sequence[Sequence[Tensor | None]]
    counted: Sequence[Sequence[bool]]
    norm_type: float

    @property
    def rounding(self) -> float:
        """Return the relative rounding error of the norm: that of float32, unless all gradients are wider."""
        dtypes = {grad.dtype for own in self.gradients for grad in own if grad is not None}
        return max((_rounding(torch.promote_types(dtype, torch.float32)) for dtype in dtypes), default=0.0)

    def of(self, parts: Sequence[Tensor]) -> float:
        flat = torch.cat([_wide(part).flatten() for part in parts]) if parts else torch.zeros(1, dtype=torch.float64)
        largest = float(flat.abs().max()) if len(flat) else 0.0  # a common factor, so that no power overflows
        return largest * float(torch.linalg.vector_norm(flat / largest, self.norm_type)) if largest else 0.0

    def of_all(self, *, everything: bool = False) -> float:
        return self.of(self._counting(everything=everything))

    def _counting(self, *, everything: bool = False) -> list[Tensor]:
        return [
            grad
            for own, flags in zip(self.gradients, self.counted, strict=True)
            for grad, counts in zip(own, flags, strict=True)
            if grad is not None and (counts or everything)
        ]

    def of_ranks(self) -> list[float]:
        return [self.of([grad for grad in own if grad is not None]) for own in self.gradients]

    def told(self) -> str:
        ranks = (f"rank {rank}: {show(norm)}" for rank, norm in enumerate(self.of_ranks()))
        return f"{show(self.of_all())} over all ranks, {', '.join(ranks)}"

    def overflowing(self) -> Iterator[torch.dtype]:
        """Yield each dtype whose gradients have powers that add up to more than its largest number."""
        power = max(self.norm_type, 1.0) if self.norm_type != math.inf else 1.0
        counting = self._counting()
        for dtype in dict.fromkeys(grad.dtype for grad in counting):
            if self.of([grad for grad in counting if grad.dtype == dtype]) > torch.finfo(dtype).max ** (1 / power):
                yield dtype

    def diagnose(self, held: Sequence[Tensor | None], rank: int, position: int, max_norm: float) -> Diagnosis:
        """Return the mistakes that explain every gradient of this rank, or else the wrong gradient alone."""
        given = self.gradients[rank]

        def all_scaled(factor: float, held: Sequence[Tensor | None]) -> bool:
            return all(_near(found, one, factor) for one, found in zip(given, held, strict=True))

        def one_scaled(factor: float, held: Sequence[Tensor | None]) -> bool:
            return _near(held[position], given[position], factor)

        def lost_imaginary_parts(held: Sequence[Tensor | None]) -> bool:
            found, right = held[position], given[position]
            if found is None or right is None or not right.is_complex():
                return False
            return bool(right.imag.any()) and not found.imag.any()

        tables = [
            [Candidate(text, holds=partial(all_scaled, factor)) for text, factor in mistakes]
            for mistakes in (
                _NOT_CLIPPED,
                [*self._always_scaled(max_norm), *self._wrong_factors(self._wrong_norms(rank), max_norm)],
                self._overflows(),
                _NOT_FINITE,
                self._wrong_factors(self._norms_of_parts(), max_norm),
            )
        ]
        alone = [
            *(
                Candidate(f"gradient {position} was {text} on this rank", holds=partial(one_scaled, factor))
                for text, factor in (("not clipped", 1.0), ("multiplied by 0", 0.0))
            ),
            Candidate(
                f"the imaginary parts of gradient {position} are dropped on this rank", holds=lost_imaginary_parts
            ),
        ]
        return explain(held, *tables, alone)

    def diagnose_norm(self, held: float, rank: int, max_norm: float) -> Diagnosis:
        """Return the mistakes that give the norm that a rank returns."""

        def is_found(norm: float, held: float) -> bool:
            return abs(held - norm) <= self.rounding * norm

        clipped = [("it is the norm after clipping", min(max_norm, self.of_all()))]
        return explain(
            held,
            *(
                [Candidate(text, holds=partial(is_found, norm)) for text, norm in mistakes]
                for mistakes in (clipped, self._wrong_norms(rank), self._norms_of_parts())
            ),
        )

    def _always_scaled(self, max_norm: float) -> Iterator[tuple[str, float]]:
        norm = self.of_all()
        yield "they were scaled up: a norm below max_norm is left as it is", max_norm / (norm + 1e-6)
        yield "the gradients were divided by their norm, whatever max_norm is", 1 / (norm + 1e-6)

    def _wrong_factors(self, norms: Iterator[tuple[str, float]], max_norm: float) -> Iterator[tuple[str, float]]:
        """Yield each wrong norm, and the factor that it leads to. A factor of 1 is no clipping, whatever the norm."""
        for text, norm in norms:
            if max_norm < norm + 1e-6:
                yield text, max_norm / (norm + 1e-6)

    def _norms_of_parts(self) -> Iterator[tuple[str, float]]:
        """Yield the norms that leave some gradients out."""
        for text, parts in parts_of(self.gradients, self.counted):
            yield f"{text} from the norm", self.of(parts)

    def _wrong_norms(self, rank: int) -> Iterator[tuple[str, float]]:
        """Yield each wrong norm on this rank."""
        own = self.of_ranks()
        power = self.norm_type if self.norm_type != math.inf else 1.0
        yield (
            f"the norm of this rank alone was used: it must be that of all ranks{self._if_copies()}",
            own[rank],
        )
        yield "elements that several ranks hold were counted on each of them", self.of_all(everything=True)
        yield "norms of ranks were added: add their powers instead", sum(own)
        yield "the powers of the norms were averaged, not added", self.of_all() / len(own) ** (1 / power)
        yield "norms of ranks were averaged", sum(own) / len(own)
        if own[rank] < max(own):
            yield "the largest norm of a rank was taken: add powers instead", max(own)
        yield "the powers of the norms were added, and no root was taken of the sum", self.of_all() ** power
        yield from self._complex_mistakes()

    def _overflows(self) -> Iterator[tuple[str, float]]:
        for dtype in self.overflowing():
            limit = torch.finfo(dtype).max
            yield f"the powers of a norm in {dtype} overflowed, beyond {limit:g}: take it in a wider dtype", 0.0

    def _complex_mistakes(self) -> Iterator[tuple[str, float]]:
        counting = self._counting()
        if any(grad.is_complex() for grad in counting):
            must = "the norm is that of absolute values"
            yield f"imaginary parts were not counted: {must}", self.of([grad.real for grad in counting])
            parts = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in counting]
            yield f"real and imaginary parts were counted each for itself: {must}", self.of(parts)

    def _if_copies(self) -> str:
        """Return a hint to pass ``counted`` if every rank holds the same gradients, as under data parallelism."""
        first, *others = self.gradients
        if not all(flag for flags in self.counted for flag in flags):
            return ""  # it is given
        if not others or not all(len(own) == len(first) and all(map(_equal, own, first)) for own in others):
            return ""
        return "; if these are copies of one gradient (data parallel), pass counted= with True on one rank alone"


def _near(found: Tensor | None, given: Tensor | None, factor: float) -> bool:
    if found is None or given is None:
        return found is given
    expected = _wide(given) * factor
    near = torch.isclose(_wide(found), expected, rtol=2 * _rounding(given.dtype), atol=0, equal_nan=True)
    return bool(near.all())


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding error of a clipped gradient.

    A norm of thousands of elements, a division and a product round some ten times, each by half of eps.
    """
    return max(8 * torch.finfo(dtype).eps, 1e-12) if dtype.itemsize > 2 else 2 * torch.finfo(dtype).eps


def _clip(
    clip: Callable[[list[Tensor], float], Any], gradients: Given, max_norm: float, may_raise: bool = False
) -> Clipped:
    parameters: list[Tensor] = []
    for grad in gradients[dist.get_rank()]:
        parameter = nn.Parameter(torch.zeros(2) if grad is None else torch.zeros_like(grad))
        parameter.grad = None if grad is None else grad.clone()
        parameters.append(parameter)
    try:
        norm = clip(parameters, max_norm)
    except (Deadlock, PeerFailed):
        raise
    except Exception as error:
        if not may_raise:
            raise
        return Clipped([], None, f"{type(error).__name__}: {error}")
    held = [None if p.grad is None else p.grad.detach().cpu() for p in parameters]
    return Clipped(held, None if norm is None else float(norm))
