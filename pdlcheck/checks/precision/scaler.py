"""The checks of loss scalers and of sums in half precision.

A loss scaler must step on all ranks or on none. A sum of half precision must be added in a wider dtype. The references
are the rule of a scaler in plain Python, and sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.diagnosis import Candidate, explain, predictions
from pdlcheck.checks.message import case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.precision.scaler_rules import Rule, Taken, scale_cause, weights_cause
from pdlcheck.checks.tolerances import Tolerance
from pdlcheck.compat.torch.optim import skips_overflows
from pdlcheck.errors import Inconclusive

__all__ = ["check_grad_scaler", "check_low_precision_sum"]

Step = Callable[[Any, torch.optim.Optimizer, nn.Module], object]

LEARNING_RATE = 0.5
WEIGHTS = 3  # the bias is a separate parameter
SORTS = (math.inf, math.nan, -math.inf)


@takes_world
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
    max_norm: float | None = None,
) -> None:
    """Check that no rank steps if the gradients of one rank overflow, and that all ranks keep the right scale.

    The reference is one process that sees the gradients of all ranks. A step with an overflow is skipped and multiplies
    the scale by the backoff factor. After ``growth_interval`` steps without an overflow, the scale is multiplied by the
    growth factor.

    The check takes all steps three times, each time with a new scaler: gradients overflow to inf, to NaN and to -inf. A
    call of the optimizer's ``step`` with gradients counts as a step even if it does not change the weights. Fused
    optimizers, which skip such a step themselves, are excepted.

    Args:
        make_scaler: called on every rank; makes a scaler with the methods of ``torch.amp.GradScaler`` and a small
            growth interval, so that growth occurs.
        world: where the ranks run.
        overflows: for each training step the ranks whose gradients overflow. One parameter's gradient overflows,
            alternately the bias and a weight.
        world_size: number of ranks.
        sync: called as ``sync(module)`` on every rank between backward and ``step``; must leave the mean over ranks in
            the gradients of the module's two parameters. None if each rank holds gradients of its own: pipeline stages,
            sharded parameters.
        step: called as ``step(scaler, optimizer, module)`` on every rank; the default is ``scaler.step(optimizer)`` and
            ``scaler.update()``.
        replicated: whether ranks step with the mean of their gradients; by default they do if there is a ``sync``. Pass
            True without ``sync`` if ``step`` synchronises.
        optimizer: called as ``optimizer(parameters, lr=0.5)``; must step as SGD without momentum does. If its ``step``
            is not one of torch's, the check does not count calls of it, because it may skip a step itself.
        idle: ranks that never scale a loss and have no gradient, such as a stage of frozen layers.
        max_norm: the limit for the norm of the gradients if ``step`` clips, as in ``torch.nn.utils.clip_grad_norm_``.
            The norm is that of the gradients that all ranks step with, or of all ranks' gradients together if each rank
            has its own. Norms grow from step to step. With 10 and two ranks that step with the mean, the first step is
            not clipped, and the others are.

    Raises:
        ValueError: ``max_norm`` is not above 0, or there is no ``step`` that could clip; or a rank does not exist.
        AssertionError: names the first step and rank that differ, and as the likely cause a mistake that leads to
            exactly the weights, or scales, that the ranks hold.
        Inconclusive: no gradient overflows in any step, or in all of them; or no norm exceeds ``max_norm``.

    Example:
        >>> from pdlcheck.primitives import DistributedGradScaler
        >>> from pdlcheck.worlds import get_world
        >>> make = lambda: DistributedGradScaler("cpu", init_scale=8.0, growth_interval=2)
        >>> check_grad_scaler(make, get_world("sim"), overflows=[[], [1], [], [], [0]])
    """
    __tracebackhide__ = True
    if not any(overflows) or all(overflows):
        raise Inconclusive("check_grad_scaler needs steps with an overflow and steps without one, got only one sort")
    for rank in {*idle}.union(*overflows):
        if not 0 <= rank < world_size:
            raise ValueError(f"check_grad_scaler has ranks 0 to {world_size - 1}, overflows or idle names rank {rank}")
    if max_norm is not None and not (max_norm > 0 and step is not None):
        raise ValueError(
            f"check_grad_scaler takes max_norm, above 0, beside a step that clips; got {max_norm} and step={step}"
        )
    mean = sync is not None if replicated is None else replicated
    plan = Plan([list(ranks) for ranks in overflows], sync, step or _plain_step, optimizer, list(idle))
    ranks: list[list[list[Seen]]] = world.run(_scaled_steps, make_scaler, plan, world_size=world_size)
    clipped = []
    for place, sort in enumerate(SORTS):
        facts = case(
            world,
            world_size,
            overflows=plan.overflows,
            overflow_to=None if sort == math.inf else f"{sort:g}",
            idle=plan.idle or None,
            max_norm=max_norm,
        )
        own = [seen[place] for seen in ranks]
        clipped.append(_require_one_process(name_of(make_scaler), plan, sort, own, mean, max_norm, facts))
    if max_norm is not None and not any(clipped):
        raise Inconclusive(f"check_grad_scaler: no step has gradients of a norm above max_norm={max_norm}; lower it")


def _require_one_process(
    who: str, plan: Plan, sort: float, ranks: list[list[Seen]], mean: bool, max_norm: float | None, facts: str
) -> bool:
    """Check all steps in which gradients overflow to ``sort``, and return whether a step clipped."""
    __tracebackhide__ = True
    rule = ranks[0][0].rule
    scales = rule.scales([bool(overflowing) for overflowing in plan.overflows])
    world_size = len(ranks)
    everyone, weights = range(world_size), [1.0] * world_size
    clipped = False
    for number, overflowing in enumerate(plan.overflows):
        slopes = [_slope(r, number, world_size) for r in everyone]
        steps = [sum(slopes) / world_size if mean else slope for slope in slopes]
        norm = math.sqrt(WEIGHTS + 1) * math.hypot(*(steps[:1] if mean else [steps[r] for r in _busy(plan, everyone)]))
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        clipped = clipped or (factor < 1 and not overflowing)
        for rank in _busy(plan, everyone) if not overflowing else []:
            weights[rank] -= LEARNING_RATE * factor * steps[rank]
        gradients = [None if r in plan.idle else _gradient(r, number, plan, world_size, sort) for r in everyone]
        taken = Taken(
            overflowing=overflowing,
            gradients=gradients,
            mean=mean,
            scale=scales[number],
            lr=LEARNING_RATE,
            before=[one[number].weights for one in ranks],
            found=[one[number + 1].weights for one in ranks],
            expected=[torch.full((WEIGHTS + 1,), weight) for weight in weights],
            max_norm=max_norm,
            sort=sort,
        )
        told = [[seen.scale for seen in one[: number + 2]] for one in ranks]
        for rank in everyone:
            _require_weights(f"{who}: after step {number} rank {rank}", rank, taken, facts)
            _require_skipped(f"{who}: in step {number} rank {rank}", ranks[rank][number + 1].called, taken, facts)
            if not math.isclose(told[rank][-1], scales[number + 1], rel_tol=1e-6):
                raise failure(
                    f"{who}: after step {number} rank {rank} has scale {told[rank][-1]:g}, "
                    f"one process has {scales[number + 1]:g}",
                    step=taken.happened,
                    likely_cause=scale_cause(rule, plan.overflows[: number + 1], told),
                    case=facts,
                )
    return clipped


@takes_world
def check_low_precision_sum(
    sync: Callable[[list[Tensor]], object],
    contributions: Sequence[Tensor],
    world: Any,
    *,
    mean: bool = True,
) -> None:
    """Check that gradients of float16 or bfloat16 are added in a wider dtype, and only the result is rounded.

    The reference adds the same values in float64 and rounds once. A rank's result may be off by one unit in the last
    place, and by the rounding of additions in float32.

    Args:
        sync: called as ``sync(parameters)`` on every rank, with a list of one parameter that carries its gradient.
        contributions: the gradient of each rank. Different magnitudes reveal sums in low precision. Values near the
            largest number of the dtype reveal sums that overflow where the mean would not.
        world: where the ranks run.
        mean: whether ``sync`` leaves the mean over ranks (True) or the sum.

    Raises:
        AssertionError: names rank, index and the contributions.
        Inconclusive: the result itself exceeds the range of the dtype.

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
                likely_cause=explain(
                    found.double(),
                    *_causes_of_sum(given, rank, dtype, mean=mean),
                    tolerance=Tolerance(relative=2 * limits.eps),
                    expected=exact,
                ),
                case=facts,
            )


def _causes_of_sum(
    given: Tensor, rank: int, dtype: torch.dtype, *, mean: bool
) -> tuple[Iterable[Candidate[Tensor]], ...]:
    """Return the causes of a wrong sum or mean over ranks; ``given`` has the contributions in float64."""
    total, count = given.sum(0), len(given)
    exact = total / count if mean else total
    # The largest error of a sum of so many terms whose partial sums are rounded to dtype, in any order.
    lost = Tolerance(absolute=count * torch.finfo(dtype).eps * given.abs().sum(0) / (count if mean else 1))
    cure = "divide before adding, or add and divide in float32" if mean else "add in float32"
    return (
        [Candidate(f"the sum left the range of {dtype}: {cure}", holds=lambda found: not bool(found.isfinite().all()))],
        predictions(
            [
                ("it is the sum: it was not divided by world_size", total)
                if mean
                else ("it is the mean: it was divided by world_size", total / count),
                ("it is this rank's own: it was never synchronised", given[rank]),
            ]
        ),
        [
            Candidate(
                f"it was added in {dtype}, which loses what is small beside what is large: add in float32",
                holds=lambda found: bool(lost.accepts(found, exact).all()),
            )
        ],
    )


@dataclass(frozen=True)
class Plan:
    """The steps of :func:`check_grad_scaler`, the same on every rank."""

    overflows: list[list[int]]
    sync: Callable[[nn.Module], object] | None
    step: Step
    optimizer: Callable[..., torch.optim.Optimizer]
    idle: list[int]


@dataclass(frozen=True)
class Seen:
    """The state of one rank after a step: its weights with the bias at the end, its scale, and its optimizer's calls.

    ``called`` is the record of :class:`_Calls` for the step.
    """

    weights: Tensor
    scale: float
    rule: Rule
    called: list[bool]


def _busy(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have gradients."""
    return [rank for rank in ranks if rank not in plan.idle]


def _plain_step(scaler: Any, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    scaler.step(optimizer)
    scaler.update()


def _slope(rank: int, number: int, world_size: int) -> float:
    """Return the gradient of ``rank`` in a step.

    It is a multiple of world_size, so that means are exact. No two ranks or steps have the same gradient.
    """
    return float(world_size * (1 + rank + 3 * number))


def _gradient(rank: int, number: int, plan: Plan, world_size: int, sort: float) -> Tensor:
    """Return the unscaled gradient of ``rank`` in a step, with its overflow."""
    gradient = torch.full((WEIGHTS + 1,), _slope(rank, number, world_size))
    if rank in plan.overflows[number]:
        gradient[_place(number, plan)] = sort
    return gradient


def _place(number: int, plan: Plan) -> int:
    """Return the index at which a gradient overflows in a step: the bias and a weight alternate."""
    before = sum(bool(ranks) for ranks in plan.overflows[:number])
    return number % WEIGHTS if before % 2 else WEIGHTS


def _scaled_steps(make_scaler: Callable[[], Any], plan: Plan) -> list[list[Seen]]:
    """Take all steps once for each kind of overflow in ``SORTS``."""
    return [_steps_of(sort, make_scaler, plan) for sort in SORTS]


def _steps_of(sort: float, make_scaler: Callable[[], Any], plan: Plan) -> list[Seen]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = nn.Module()
    module.weight, module.bias = nn.Parameter(torch.ones(WEIGHTS)), nn.Parameter(torch.ones(1))
    optimizer = plan.optimizer(module.parameters(), lr=LEARNING_RATE)
    calls = _Calls(optimizer)
    scaler = make_scaler()
    if not getattr(scaler, "is_enabled", lambda: True)():
        raise ValueError("check_grad_scaler got a scaler that is switched off; enable it, on 'cpu' without CUDA")
    rule = Rule(
        scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    )
    seen = [Seen(_flat(module), scaler.get_scale(), rule, [])]
    for number, overflowing in enumerate(plan.overflows):
        optimizer.zero_grad()
        if rank not in plan.idle:
            loss = (module.weight.sum() + module.bias.sum()) * _slope(rank, number, world_size)
            scaler.scale(loss).backward()
            assert module.weight.grad is not None
            assert module.bias.grad is not None
            if rank in overflowing:
                place = _place(number, plan)
                grad = module.bias.grad if place == WEIGHTS else module.weight.grad
                grad[place % WEIGHTS] = sort
        if plan.sync is not None:
            plan.sync(module)
        plan.step(scaler, optimizer, module)
        seen.append(Seen(_flat(module), scaler.get_scale(), rule, calls.since_last()))
    return seen


class _Calls:
    """A record of the calls of an optimizer's ``step`` with gradients: for each, whether all gradients are zero."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.found: list[bool] = []
        step = getattr(type(optimizer), "step", None)
        if isinstance(optimizer, torch.optim.Optimizer) and getattr(step, "__module__", "").startswith("torch."):
            optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        skips_itself = skips_overflows(optimizer) and bool(getattr(optimizer, "found_inf", False))
        if held and not skips_itself:
            self.found.append(not any(grad.any() for grad in held))

    def since_last(self) -> list[bool]:
        found, self.found = self.found, []
        return found


def _flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach() for parameter in module.parameters()])


def _require_weights(who: str, rank: int, taken: Taken, facts: str) -> None:
    __tracebackhide__ = True
    if rank in taken.wrong:
        found, expected = taken.found[rank], taken.expected[rank]
        at = first_index(~taken.near(found, expected))
        what = f"bias {show(found[at])}" if at == (WEIGHTS,) else f"weight {show(found[at])} at {at}"
        raise failure(
            f"{who} holds {what}, one process holds {expected[at].item():g}",
            step=taken.happened,
            likely_cause=weights_cause(taken),
            case=facts,
        )


def _require_skipped(who: str, called: list[bool], taken: Taken, facts: str) -> None:
    """Check that a rank does not call the optimizer's ``step`` in a step with an overflow.

    A call with gradients of 0 leaves the weights of plain SGD unchanged, but it changes the state of momentum or Adam.
    """
    __tracebackhide__ = True
    if taken.overflowing and called:
        zeros = all(called)
        did = (
            "gradients are set to 0 and stepped with" if zeros else "a step is taken, and weights are put back after it"
        )
        raise failure(
            f"{who} calls the optimizer's step with gradients{' of 0' if zeros else ''}, one process skips it",
            step=taken.happened,
            likely_cause=f"{did}: momentum, Adam's averages and weight decay still go on; leave the call out",
            case=facts,
        )


def _sum(sync: Callable[[list[Tensor]], object], contributions: list[Tensor]) -> Tensor:
    given = contributions[dist.get_rank()]
    parameter = nn.Parameter(torch.zeros_like(given))
    parameter.grad = given.clone()
    sync([parameter])
    return parameter.grad.detach()
