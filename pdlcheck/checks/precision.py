"""A loss scaler steps on all ranks or on none; a clipped gradient is that of one process; half precision sums hold.

What is compared with is made here: the scaler's rule in plain Python, norms and sums in float64 in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.message import case, failure, first_index, name_of, show
from pdlcheck.errors import Inconclusive

__all__ = ["check_clip_grad_norm", "check_grad_scaler", "check_low_precision_sum"]

Step = Callable[[Any, torch.optim.Optimizer, nn.Module], object]

LEARNING_RATE = 0.5


def check_grad_scaler(
    make_scaler: Callable[[], Any],
    world: Any,
    *,
    overflows: Sequence[Sequence[int]],
    world_size: int = 2,
    sync: Callable[[nn.Module], object] | None = None,
    step: Step | None = None,
    replicated: bool | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    idle: Sequence[int] = (),
) -> None:
    """If the gradients of one rank overflow, no rank may step, and all ranks keep the scale of one process.

    The oracle is one process that sees the gradients of all ranks: a step with an overflow is skipped and multiplies
    the scale by the backoff factor; after ``growth_interval`` steps without, it is multiplied by the growth factor.

    Args:
        make_scaler: called on every rank; makes a scaler with the methods of ``torch.amp.GradScaler`` and a small
            growth interval, so that growth is seen.
        world: where the ranks run.
        overflows: for each training step the ranks one of whose gradients becomes inf or NaN.
        world_size: number of ranks.
        sync: called as ``sync(module)`` on every rank between backward and ``step``; must leave the mean over ranks.
            None where each rank holds gradients of its own: pipeline stages, sharded parameters.
        step: called as ``step(scaler, optimizer, module)`` on every rank; the default is ``scaler.step(optimizer)``
            and ``scaler.update()``.
        replicated: whether ranks step with the mean of their gradients; the default is that they do if there is a
            ``sync``. True without one where ``step`` synchronises.
        optimizer: called as ``optimizer(parameters, lr=0.5)``; must step as SGD without momentum does.
        idle: ranks that never scale a loss and have no gradient, such as a stage of frozen layers.

    Raises:
        AssertionError: names the first step and rank that differ, and the likely cause.
        Inconclusive: no gradient overflows in any step, or in all of them.

    Example:
        >>> from pdlcheck.primitives import DistributedGradScaler
        >>> from pdlcheck.worlds import get_world
        >>> make = lambda: DistributedGradScaler("cpu", init_scale=8.0, growth_interval=2)
        >>> check_grad_scaler(make, get_world("sim"), overflows=[[], [1], [], [], [0]])
    """
    __tracebackhide__ = True
    if not any(overflows) or all(overflows):
        raise Inconclusive("check_grad_scaler needs steps with an overflow and steps without one, got only one sort")
    mean = sync is not None if replicated is None else replicated
    plan = Plan([list(ranks) for ranks in overflows], sync, step or _plain_step, optimizer, list(idle))
    ranks: list[list[Seen]] = world.run(_scaled_steps, make_scaler, plan, world_size=world_size)
    facts = case(world, world_size, overflows=plan.overflows, idle=plan.idle or None)
    rule = ranks[0][0].rule
    scale, calm = rule.scale, 0
    weights = [1.0] * world_size
    for number, overflowing in enumerate(plan.overflows):
        stepped = not overflowing
        for rank in range(world_size):
            if stepped and rank not in plan.idle:
                slopes = [_slope(r, number, world_size) for r in range(world_size)]
                weights[rank] -= LEARNING_RATE * (sum(slopes) / world_size if mean else slopes[rank])
        calm = calm + 1 if stepped else 0
        scale = scale if stepped else scale * rule.backoff
        if calm == rule.interval:
            scale, calm = scale * rule.growth, 0
        for rank, seen in enumerate(one[number + 1] for one in ranks):
            _require_seen(name_of(make_scaler), rank, number, overflowing, seen, weights[rank], scale, facts)


def check_clip_grad_norm(
    clip: Callable[[list[Tensor], float], Any],
    world: Any,
    *,
    gradients: Sequence[Sequence[Tensor | None]],
    max_norm: float,
    norm_type: float = 2.0,
    counted: Sequence[Sequence[bool]] | None = None,
) -> None:
    """All ranks must scale their gradients by the factor of one process that holds every gradient once.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)`` where that is below 1. The
    norm is computed in float64; it may be off by what float32, or a wider dtype of the gradients, rounds.

    Args:
        clip: called as ``clip(parameters, max_norm)`` on every rank, with parameters that carry their gradients; may
            return the norm.
        world: where the ranks run.
        gradients: of each rank; None for a parameter without one, an empty list for a rank without parameters.
        max_norm: what the norm of all may be.
        norm_type: the norm that ``clip`` uses.
        counted: for each rank and gradient, whether it counts; the default is all. False for the copies of a gradient
            that several ranks hold, but one.

    Raises:
        AssertionError: names rank, gradient, index and the likely cause: clipped by the norm of the rank alone,
            replicated gradients counted on every rank, squares that overflow.
        Inconclusive: all gradients are zero or None.

    Example:
        >>> from pdlcheck.primitives import clip_grad_norm
        >>> from pdlcheck.worlds import get_world
        >>> def clip(parameters, max_norm):
        ...     return clip_grad_norm(parameters, max_norm, sharded=True)
        >>> gradients = [[torch.tensor([3.0])], [torch.tensor([4.0]), None]]
        >>> check_clip_grad_norm(clip, get_world("sim"), gradients=gradients, max_norm=1.0)
    """
    __tracebackhide__ = True
    world_size = len(gradients)
    chosen = counted or [[True] * len(own) for own in gradients]
    ranks: list[Clipped] = world.run(_clip, clip, gradients, max_norm, world_size=world_size)
    facts = case(world, world_size, max_norm=max_norm, norm_type=norm_type)
    norms = _Norms(gradients, chosen, norm_type)
    norm = norms.of_all()
    if not norm:
        raise Inconclusive(f"{name_of(clip)}: all gradients are zero, there is nothing to clip")
    factor = min(1.0, max_norm / (norm + 1e-6))
    told = f"{show(norm)} over all ranks, {', '.join(f'rank {r}: {show(n)}' for r, n in enumerate(norms.of_ranks()))}"
    for rank, held in enumerate(ranks):
        for position, (given, found) in enumerate(zip(gradients[rank], held.gradients, strict=True)):
            if given is None or found is None:
                if given is not found:
                    raise failure(f"{name_of(clip)}: rank {rank} has another gradient {position}: None", case=facts)
                continue
            expected = given.double() * factor
            rounded = (_rounding(given.dtype) + norms.rounding) * expected.abs()
            allowed = rounded + torch.finfo(given.dtype).smallest_normal
            wrong = ~((found.double() - expected).abs() <= allowed)
            if wrong.any():
                at = first_index(wrong)
                raise failure(
                    f"{name_of(clip)}: rank {rank} holds {show(found[at])} at {at} of gradient {position}, "
                    f"{show(expected[at])} is expected",
                    norms=told,
                    factor=f"{found[at].double().item() / given[at].double().item():.6g}, expected {factor:.6g}"
                    if given[at] != 0
                    else None,
                    likely_cause=norms.cause(given, found, rank, max_norm),
                    case=facts,
                )
    for rank, held in enumerate(ranks):
        if held.norm is None:
            continue
        if abs(held.norm - norm) > norms.rounding * norm:
            raise failure(
                f"{name_of(clip)}: rank {rank} returns {held.norm:.9g}, the norm of all gradients is {norm:.9g}",
                norms=told,
                case=facts,
            )
        if held.norm != ranks[0].norm:
            raise failure(
                f"{name_of(clip)}: rank {rank} returns {held.norm!r}, rank 0 returns {ranks[0].norm!r}",
                likely_cause="ranks add in different orders: what they decide by it may differ",
                case=facts,
            )


def check_low_precision_sum(
    sync: Callable[[list[Tensor]], object],
    contributions: Sequence[Tensor],
    world: Any,
    *,
    mean: bool = True,
) -> None:
    """Gradients of float16 or bfloat16 must be added in more precision than that, and only the result rounded.

    The oracle adds the same values in float64 and rounds once: what a rank holds may be off by one unit in the last
    place, and by what adding in float32 rounds.

    Args:
        sync: called as ``sync(parameters)`` on every rank, with a list of one parameter that carries its gradient.
        contributions: the gradient of each rank; unlike magnitudes show sums in low precision, values near the largest
            number of the dtype show sums that overflow where the mean would not.
        world: where the ranks run.
        mean: what ``sync`` leaves: the mean over ranks, or the sum.

    Raises:
        AssertionError: names rank, index and the contributions.
        Inconclusive: the result itself has no place in the dtype.

    Example:
        >>> from pdlcheck.primitives import sync_gradients
        >>> from pdlcheck.worlds import get_world
        >>> small_beside_large = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 1.0)]
        >>> check_low_precision_sum(sync_gradients, small_beside_large, get_world("sim"))
    """
    __tracebackhide__ = True
    dtype, world_size = contributions[0].dtype, len(contributions)
    given = torch.stack([one.double() for one in contributions])
    exact = given.sum(0) / (world_size if mean else 1)
    limits = torch.finfo(dtype)
    if not (exact.abs() <= limits.max).all():
        raise Inconclusive(f"{name_of(sync)}: the result is beyond {dtype}, whose largest number is {limits.max:g}")
    added = torch.finfo(torch.float32).eps * world_size * given.abs().sum(0) / (world_size if mean else 1)
    allowed = limits.eps * exact.abs() + added + limits.smallest_normal * limits.eps
    facts = case(world, world_size, dtype=dtype, mean=mean)
    for rank, found in enumerate(world.run(_sum, sync, list(contributions), world_size=world_size)):
        wrong = ~((found.double() - exact).abs() <= allowed)
        if wrong.any():
            at = first_index(wrong)
            raise failure(
                f"{name_of(sync)}: rank {rank} holds {show(found[at])} at {at}, the {'mean' if mean else 'sum'} is "
                f"{show(exact[at].to(dtype))}",
                contributions=", ".join(f"rank {r}: {show(one[at])}" for r, one in enumerate(contributions)),
                likely_cause=f"the sum left the range of {dtype}: divide before adding, or add in float32"
                if not found[at].isfinite()
                else f"it was added in {dtype}, which loses what is small beside what is large: add in float32",
                case=facts,
            )


@dataclass(frozen=True)
class Plan:
    """What every rank does in :func:`check_grad_scaler`."""

    overflows: list[list[int]]
    sync: Callable[[nn.Module], object] | None
    step: Step
    optimizer: Callable[..., torch.optim.Optimizer]
    idle: list[int]


@dataclass(frozen=True)
class Rule:
    """How a scale changes."""

    scale: float
    growth: float
    backoff: float
    interval: int


@dataclass(frozen=True)
class Seen:
    """The weights of a rank and its scale, after a step."""

    weights: Tensor
    scale: float
    rule: Rule


@dataclass(frozen=True)
class Clipped:
    """What a rank holds after clipping, and the norm that it was told."""

    gradients: list[Tensor | None]
    norm: float | None


def _plain_step(scaler: Any, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    scaler.step(optimizer)
    scaler.update()


def _slope(rank: int, number: int, world_size: int) -> float:
    """The gradient of ``rank`` in a step: a multiple of world_size, so that means are exact; no two alike."""
    return float(world_size * (1 + rank + 3 * number))


def _scaled_steps(make_scaler: Callable[[], Any], plan: Plan) -> list[Seen]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(3))
    optimizer = plan.optimizer(module.parameters(), lr=LEARNING_RATE)
    scaler = make_scaler()
    rule = Rule(
        scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    )
    seen = [Seen(module.weight.detach().clone(), scaler.get_scale(), rule)]
    for number, overflowing in enumerate(plan.overflows):
        optimizer.zero_grad()
        if rank not in plan.idle:
            scaler.scale(module.weight.sum() * _slope(rank, number, world_size)).backward()
            assert module.weight.grad is not None  # backward filled it
            if rank in overflowing:
                module.weight.grad[number % 3] = math.nan if number % 2 else math.inf
        if plan.sync is not None:
            plan.sync(module)
        plan.step(scaler, optimizer, module)
        seen.append(Seen(module.weight.detach().clone(), scaler.get_scale(), rule))
    return seen


def _require_seen(
    subject: str,
    rank: int,
    number: int,
    overflowing: list[int],
    seen: Seen,
    weight: float,
    scale: float,
    facts: str,
) -> None:
    __tracebackhide__ = True
    expected = torch.full_like(seen.weights, weight)
    wrong = ~torch.isclose(seen.weights, expected, rtol=1e-5, atol=0)
    happened = f"the gradients of ranks {overflowing} overflow" if overflowing else "no gradient overflows"
    if wrong.any():
        at = first_index(wrong)
        cause = "the scaler of a rank sees the gradients of that rank alone: found_inf must be reduced over ranks"
        if overflowing and rank in overflowing:
            cause = "the overflow is not looked for, or an inf that another rank does not have is overwritten"
        if not overflowing:
            cause = "the gradient was unscaled by another factor than the loss was scaled by, twice, or not at all"
        raise failure(
            f"{subject}: after step {number} rank {rank} holds weight {show(seen.weights[at])} at {at}, "
            f"one process holds {weight:g}",
            step=f"{happened}, so {'no rank may step' if overflowing else 'every rank must step'}",
            likely_cause=cause,
            case=facts,
        )
    if not math.isclose(seen.scale, scale, rel_tol=1e-6):
        raise failure(
            f"{subject}: after step {number} rank {rank} has scale {seen.scale:g}, one process has {scale:g}",
            step=happened,
            likely_cause="ranks count overflows, or steps without one, each for itself: scales part from here on",
            case=facts,
        )


@dataclass(frozen=True)
class _Norms:
    """Norms in float64 of what ranks hold."""

    gradients: Sequence[Sequence[Tensor | None]]
    counted: Sequence[Sequence[bool]]
    norm_type: float

    @property
    def rounding(self) -> float:
        """Of the norm: float32, unless all gradients are wider."""
        dtypes = {grad.dtype for own in self.gradients for grad in own if grad is not None}
        return max((_rounding(torch.promote_types(dtype, torch.float32)) for dtype in dtypes), default=0.0)

    def of(self, parts: Sequence[Tensor]) -> float:
        flat = torch.cat([part.double().flatten() for part in parts]) if parts else torch.zeros(1, dtype=torch.float64)
        largest = float(flat.abs().max()) if len(flat) else 0.0  # taken out, so that no power overflows
        return largest * float(torch.linalg.vector_norm(flat / largest, self.norm_type)) if largest else 0.0

    def of_all(self, *, everything: bool = False) -> float:
        return self.of(
            [
                grad
                for own, flags in zip(self.gradients, self.counted, strict=True)
                for grad, counts in zip(own, flags, strict=True)
                if grad is not None and (counts or everything)
            ]
        )

    def of_ranks(self) -> list[float]:
        return [self.of([grad for grad in own if grad is not None]) for own in self.gradients]

    def cause(self, given: Tensor, found: Tensor, rank: int, max_norm: float) -> str | None:
        """What the norm was, if the factor on this rank came of one of the usual mistakes."""
        own = self.of_ranks()
        power = self.norm_type if self.norm_type != math.inf else 1.0
        norms = [
            ("the norm of this rank alone was used: it must be that of all ranks", own[rank]),
            ("elements that several ranks hold were counted on each of them", self.of_all(everything=True)),
            ("norms of ranks were added: add their powers instead", sum(own)),
            ("the powers of the norms were averaged, not added", self.of_all() / len(own) ** (1 / power)),
            ("norms of ranks were averaged", sum(own) / len(own)),
        ]
        for text, norm in norms:
            if norm and _near(found, given, min(1.0, max_norm / (norm + 1e-6))):
                return text
        if not found.isfinite().all() or not found.any():
            return f"a norm in {given.dtype} overflowed: take it in float32"
        return "the gradients were not clipped on this rank" if _near(found, given, 1.0) else None


def _near(found: Tensor, given: Tensor, factor: float) -> bool:
    expected = given.double() * factor
    return bool(((found.double() - expected).abs() <= 2 * _rounding(given.dtype) * expected.abs()).all())


def _rounding(dtype: torch.dtype) -> float:
    """A norm of thousands of elements, a division, a product: some ten round-offs, each half of eps."""
    return max(8 * torch.finfo(dtype).eps, 1e-12) if dtype.itemsize > 2 else 2 * torch.finfo(dtype).eps


def _clip(
    clip: Callable[[list[Tensor], float], Any], gradients: Sequence[Sequence[Tensor | None]], max_norm: float
) -> Clipped:
    parameters: list[Tensor] = []
    for grad in gradients[dist.get_rank()]:
        parameter = nn.Parameter(torch.zeros(2) if grad is None else torch.zeros_like(grad))
        parameter.grad = None if grad is None else grad.clone()
        parameters.append(parameter)
    norm = clip(parameters, max_norm)
    held = [None if p.grad is None else p.grad.detach().cpu() for p in parameters]
    return Clipped(held, None if norm is None else float(norm))


def _sum(sync: Callable[[list[Tensor]], object], contributions: list[Tensor]) -> Tensor:
    given = contributions[dist.get_rank()]
    parameter = nn.Parameter(torch.zeros_like(given))
    parameter.grad = given.clone()
    sync([parameter])
    return parameter.grad.detach()
