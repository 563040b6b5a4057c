"""A communication hook of DDP leaves equal replicas, and gradients that are the mean, at once or in the long run.

The gradients are given, number by number: the model's loss is ``sum(parameter * gradient)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks.message import case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.state import State, differing, digest, require_bits, state_of
from pdlcheck.errors import Inconclusive

__all__ = ["check_comm_hook"]

MakeHook = Callable[[nn.Module], tuple[Any, Callable[..., Any]]]
Given = list[list[list[Tensor | None]]]  # by rank, step, parameter

SHAPES = ((8, 12), (5,), (6, 9), (2, 3, 8), ())


@takes_world
def check_comm_hook(
    make_hook: MakeHook,
    world: Any,
    *,
    world_size: int = 3,
    relative: float | None = None,
    error_feedback: bool = False,
    residual: Callable[[Any], Mapping[str, Tensor]] | None = None,
    steps: int = 16,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    bucket_bytes: int = 128,
    unused: bool = False,
    wrap: Callable[[nn.Module, int, bool], Any] | None = None,
    seed: int = 0,
) -> None:
    """Under the hook all replicas must get the same gradients, bit for bit, and these must be the mean over ranks.

    "Are the mean" is what the hook promises, one or more of three: at each step up to an error that is ``relative``
    to the gradients; or in the long run, because what is left out is sent later (``error_feedback``); or to the last
    digit together with what the hook says that it holds back (``residual``). In every case nobody may hang: run it on
    ``sim`` under several schedules and semantics.

    Args:
        make_hook: called on every rank as ``make_hook(module)``; returns state and hook for ``register_comm_hook``.
        world: where the ranks run.
        world_size: number of replicas, 2 or more.
        relative: largest error of an element of the mean, of the largest gradient element of any rank and this
            parameter. The last steps are held to it: a hook may begin otherwise.
        error_feedback: the error of the sum over steps stays bounded: with gradients that do not change it is below
            half of what it were if each step lost as much as the worst.
        residual: of a rank's state, what the hook holds back, by name of the parameter and in its shape; then the sum
            of what was applied plus the mean of the residuals is the sum of the means.
        steps: steps to take, 8 or more with ``error_feedback``.
        shapes: of the parameters, three or more; by default also a vector, a scalar and three dimensions.
        dtypes: of the parameters; each shape comes in each.
        bucket_bytes: small, so that there are several buckets.
        unused: leave parameters out, some on one rank, some on all, in every other step.
        wrap: called as ``wrap(module, bucket_bytes, find_unused)``; default is torch's ``DistributedDataParallel``.
        seed: of the gradients.

    Raises:
        AssertionError: names step, parameter, rank, index, both values and the likely cause.
        Inconclusive: nothing is promised, so that anything would pass; or there was but one bucket.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        >>> from pdlcheck.worlds import get_world
        >>> check_comm_hook(lambda module: (None, allreduce_hook), get_world("sim"), relative=1e-6)
    """
    __tracebackhide__ = True
    if world_size < 2:
        raise ValueError(f"check_comm_hook compares ranks, it needs world_size 2 or more, got {world_size}")
    if error_feedback and steps < 8:
        raise ValueError(f"check_comm_hook needs 8 steps or more to see an error grow, got {steps}")
    if relative is None and not error_feedback and residual is None:
        raise Inconclusive("check_comm_hook was told of no promise; pass relative, error_feedback or residual")
    kinds = [(shape, dtype) for dtype in dtypes for shape in shapes]
    given = _given(kinds, world_size, steps, seed, unused, constant=error_feedback)
    seen = world.run(
        _train, make_hook, kinds, given, wrap or _torchs, bucket_bytes, unused, residual, world_size=world_size
    )
    who = seen[0].hook
    facts = case(world, world_size, steps=steps, bucket_bytes=bucket_bytes, dtypes=list(map(str, dtypes)), seed=seed)
    _same_everywhere(who, [one.steps for one in seen], given, facts)
    if not seen[0].buckets:
        raise failure(f"{who}: the hook was never called", likely_cause="it was not registered", case=facts)
    results = Results(who, given, seen[0].steps, facts)
    results.finite()
    if relative is not None:
        results.near(relative)
    if error_feedback:
        results.bounded()
    if residual is not None:
        results.telescoping([one.residual for one in seen])
    if seen[0].buckets < 2:
        raise Inconclusive(
            f"{who}: all gradients came in one bucket, so that the order of operations was not tried; "
            f"pass fewer bucket_bytes than {bucket_bytes}, or more shapes"
        )


@dataclass(frozen=True)
class Seen:
    """What one rank holds after each step, and what its hook holds back in the end."""

    hook: str
    buckets: int
    steps: list[State]
    residual: dict[str, Tensor]


@dataclass(frozen=True)
class Results:
    """The gradients that all ranks hold after each step, beside those that each rank gave."""

    who: str
    given: Given
    found: list[State]
    facts: str

    @property
    def names(self) -> list[str]:
        return list(self.found[0])

    def mean(self, step: int, place: int) -> Tensor | None:
        """Of the ranks' gradients, in float64; None where no rank has one."""
        own = [rank[step][place] for rank in self.given]
        there = [grad.double() for grad in own if grad is not None]
        return torch.stack(there).sum(0) / len(own) if there else None

    def scale(self, step: int, place: int) -> float:
        """The largest element that any rank gave."""
        own = [rank[step][place] for rank in self.given]
        return max((float(grad.abs().max()) for grad in own if grad is not None), default=0.0)

    def applied(self, step: int, place: int) -> Tensor:
        """What the ranks hold in float64; None and what nobody gave count as zero."""
        held = self.found[step][self.names[place]]
        if held is None or self.mean(step, place) is None:
            like = next(g for rank in self.given for s in rank if (g := s[place]) is not None)
            return torch.zeros_like(like, dtype=torch.float64)
        return held.double()

    def _eps(self, name: str) -> float:
        return torch.finfo(next(h.dtype for state in self.found if (h := state[name]) is not None)).eps

    def finite(self) -> None:
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
        """The last quarter of the steps."""
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
                        contributions=", ".join(
                            f"rank {r}: {'None' if g is None else show(g[at])}"
                            for r, g in enumerate(rank[step][place] for rank in self.given)
                        ),
                        allowed_error=f"{allowed:.3g}, {relative:.3g} of the largest gradient element",
                        likely_cause=self._cause(held, mean, step, place, allowed),
                        case=self.facts,
                    )

    def _cause(self, held: Tensor, mean: Tensor, step: int, place: int, allowed: float) -> str | None:
        off = float((held - mean).norm())

        def near(candidate: Tensor) -> bool:
            """And nearer than the mean by far: with a large tolerance, much is near."""
            apart = held - candidate
            return bool((apart.abs() <= allowed * len(self.given)).all()) and 4 * float(apart.norm()) <= off

        n = len(self.given)
        if near(mean * n):
            return f"it is world_size = {n} times too large: summed, not averaged"
        if near(mean / n):
            return f"it is world_size = {n} times too small: divided twice"
        if near(torch.zeros_like(mean)):
            return "it is zero: the gradient was lost"
        for rank, own in enumerate(self.given):
            grad = own[step][place]
            if grad is not None and near(grad.double()):
                return f"it is the gradient of rank {rank}: never reduced"
        if step and (before := self.mean(step - 1, place)) is not None and near(before):
            return "it is the mean of the step before: a buffer was sent before it was filled"
        return None

    def bounded(self) -> None:
        __tracebackhide__ = True
        for place, name in enumerate(self.names):
            total, worst = 0.0 * self.applied(0, place), 0.0
            for step in range(len(self.found)):
                mean = self.mean(step, place)
                lost = self.applied(step, place) - (0.0 if mean is None else mean)
                total, worst = total + lost, max(worst, float(lost.norm()))
            scale = max(self.scale(step, place) for step in range(len(self.found)))
            off, allowed = float(total.norm()), worst * len(self.found) / 2
            rounding = self._eps(name) * scale * total.numel() ** 0.5 * len(self.found)  # the same way at each step
            if off > allowed and off > rounding:
                raise failure(
                    f"{self.who}: after {len(self.found)} steps the sum of what was applied to {name} is {off:.4g} off "
                    f"the sum of the means, the worst single step is {worst:.4g} off",
                    growth=f"{off / worst:.3g} times the worst step, with error feedback below {allowed / worst:.3g}",
                    likely_cause="what is not sent is lost: it must be added to the next gradient; or the sum does not "
                    "fit the dtype in which it is sent",
                    case=self.facts,
                )

    def telescoping(self, residuals: list[dict[str, Tensor]]) -> None:
        __tracebackhide__ = True
        for place, name in enumerate(self.names):
            bare = name.removeprefix("gradient of ").strip("'")
            zero = torch.zeros_like(self.applied(0, place))
            own = [one[bare].double() if bare in one else zero for one in residuals]
            kept = torch.stack(own).sum(0) / len(own)
            sums = [self.applied(step, place) for step in range(len(self.found))]
            means = [m for step in range(len(self.found)) if (m := self.mean(step, place)) is not None]
            found, expected = torch.stack(sums).sum(0) + kept, torch.stack(means).sum(0)
            # each step rounds what is applied, and what is kept, once for each rank
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


class _Model(nn.Module):
    """The gradient of every parameter is what forward is given; a parameter that gets None is not used."""

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes])

    def forward(self, *grads: Tensor | None) -> Tensor:
        parts = [(p * g).sum().double() for p, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack(parts).sum()


def _torchs(module: nn.Module, bucket_bytes: int, find_unused: bool) -> Any:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=find_unused)


def _given(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    world_size: int,
    steps: int,
    seed: int,
    unused: bool,
    constant: bool,
) -> Given:
    """Sixteenths, so that sums are exact: other ones on every rank, and 1, 2 and 4 times them in turn at each step.

    Every parameter has entries of several magnitudes, and a mean that is not zero. An error that must not grow is seen
    with gradients that are ``constant``, but for what is unused.
    """
    draws = torch.Generator().manual_seed(seed)
    given: Given = []
    for _ in range(world_size):
        one: list[Tensor] = []
        for shape, dtype in shapes:
            values = torch.randn(shape, generator=draws) * torch.randn(shape, generator=draws).exp() + 0.5
            one.append(((values * 16).round().clamp(-2048, 2048) / 16).to(dtype))
        given.append([[grad if constant else grad * 2 ** (step % 3) for grad in one] for step in range(steps)])
    for step in range(1, steps, 2) if unused else ():
        for rank in given[1:]:
            rank[step][0] = None
        for rank in given:
            rank[step][2] = None
    return given


def _train(
    make_hook: MakeHook,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    given: Given,
    wrap: Callable[[nn.Module, int, bool], Any],
    bucket_bytes: int,
    unused: bool,
    residual: Callable[[Any], Mapping[str, Tensor]] | None,
) -> Seen:
    model = _Model(shapes)
    ddp = wrap(model, bucket_bytes, unused)
    state, hook = make_hook(model)
    places = []

    def counted(state: Any, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        places.append(bucket.index())
        return hook(state, bucket)

    ddp.register_comm_hook(state, counted)
    steps: list[State] = []
    for grads in given[dist.get_rank()]:
        model.zero_grad()
        ddp(*grads).backward()
        steps.append({name: grad for name, grad in state_of(model, gradients=True).items() if name[:8] == "gradient"})
    held = {} if residual is None else {name: tensor.clone() for name, tensor in residual(state).items()}
    return Seen(name_of(hook), max(places, default=-1) + 1, steps, held)


def _same_everywhere(who: str, everyone: list[list[State]], given: Given, facts: str) -> None:
    __tracebackhide__ = True
    for step, states in enumerate(zip(*everyone, strict=True)):
        for name in differing([digest(state) for state in states]):
            place = list(states[0]).index(name)
            own = [grads[step][place] for grads in given]
            pairs = zip(own, (state[name] for state in states), strict=True)
            local = all(grad is not None and held is not None and torch.equal(grad, held) for grad, held in pairs)
            cause = "ranks compute the result from what only they have, or met in different operations"
            for rank, state in enumerate(states[1:], start=1):
                require_bits(
                    f"{who}: replicas differ after step {step + 1}: rank {rank}",
                    name,
                    (state[name], states[0][name]),
                    "rank 0 holds",
                    likely_cause="it is this rank's own gradient: never reduced" if local else cause,
                    case=facts,
                )
