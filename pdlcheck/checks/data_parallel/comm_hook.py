"""The check of a communication hook of DDP: replicas stay equal, gradients are the mean, at once or in the long run.

The check chooses every gradient element, because the model's loss is ``sum(parameter * gradient)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks.data_parallel.comm_hook_results import Given, Results
from pdlcheck.checks.diagnosis import Candidate, explain
from pdlcheck.checks.message import Place, case, failure, made_by_start, name_of, takes_world
from pdlcheck.checks.state import State, differing, digest, require_bits, state_of, whole
from pdlcheck.errors import Inconclusive, PdlcheckError

__all__ = ["check_comm_hook"]

MakeHook = Callable[[nn.Module], tuple[Any, Callable[..., Any]]]

SHAPES = ((8, 12), (5,), (6, 9), (2, 3, 8), ())
SMALL = 2**-10  # not 0, because a hook may divide by the gradient
LONG = 512


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
    """Check that under the hook all replicas get equal gradients, bit for bit, and that they are the mean over ranks.

    The hook promises at least one of three things. With ``relative``, the error of each step is small relative to the
    gradients. With ``error_feedback``, the mean is right in the long run, because the hook sends later what it left
    out. With ``residual``, the applied gradients and the hook's own residuals add up to the mean, to the last digit.
    In every case no rank may hang: run the check on ``sim`` under several schedules and semantics.

    Args:
        make_hook: called on every rank as ``make_hook(module)``; returns state and hook for ``register_comm_hook``.
        world: where the ranks run.
        world_size: number of replicas, 2 or more.
        relative: largest error of an element, relative to the largest gradient element of this parameter on any rank.
            Only the last quarter of the steps must meet it, because a hook may start differently. No two steps in a row
            have the same gradients; with ``error_feedback`` they differ in their sign.
        error_feedback: the error of the sum over steps stays bounded. Gradients stay the same for ``steps`` steps, and
            are a thousandth of that for as many more, so that the hook can send the rest. If more than an eighth of
            the largest error then remains, the check runs again with equal gradients. It takes 512 steps, or
            ``4 * steps`` if that is more, and fails if the error grows. An error that grows meets two conditions. In
            each of the last two quarters it is a fifth larger than in the quarter before. In the second half it is
            2.4 times as large as in the first; this factor is 2.6 if every step loses the same, and 1 if no step
            loses more.
        residual: called with a rank's state; returns what the hook holds back, by parameter name and in the parameter's
            shape. The sum of the applied gradients plus the mean of the residuals must be the sum of the means.
        steps: steps to take, 8 or more with ``error_feedback``.
        shapes: shapes of the parameters, three or more; the default includes a vector, a scalar and a 3-D tensor.
        dtypes: dtypes of the parameters; each shape comes in each dtype.
        bucket_bytes: a small size, so that there are several buckets.
        unused: leave parameters out in every other step: one on all ranks except rank 0, and one on all ranks.
        wrap: called as ``wrap(module, bucket_bytes, find_unused)``; default is torch's ``DistributedDataParallel``.
        seed: seed of the gradients.

    Raises:
        AssertionError: a gradient is wrong. The message names step, parameter, rank, index, both values and the likely
            cause.
        Inconclusive: no promise is given, so that every hook would pass; or there was only one bucket.

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
    facts = case(world, world_size, steps=steps, bucket_bytes=bucket_bytes, dtypes=list(map(str, dtypes)), seed=seed)

    def trained(factors: list[float], looks_at: int) -> tuple[Results, list[Seen]]:
        given = _given(kinds, world_size, factors, seed, looks_at if unused else 0)
        train = (make_hook, kinds, given, wrap or _torchs, bucket_bytes, unused, residual, looks_at)
        try:
            seen: list[Seen] = world.run(_train, *train, world_size=world_size)
        except Exception as error:
            if not isinstance(error, PdlcheckError | TypeError):
                error.add_note(
                    f"while check_comm_hook trained parameters of shapes {', '.join(map(str, shapes))}; pass other "
                    "shapes= for a hook that does not take such, as torch's PowerSGD takes none without dimensions; "
                    "buckets are made anew after the first backward pass: what is kept for one may have another size"
                )
            raise
        _same_everywhere(seen[0].hook, [one.steps for one in seen], given, facts)
        if not seen[0].buckets:
            raise failure(
                f"{seen[0].hook}: the hook was never called", likely_cause="it was not registered", case=facts
            )
        return Results(seen[0].hook, given, seen[0].steps, facts), seen

    if error_feedback:
        results, seen = trained([1.0] * steps + [SMALL] * steps, steps)
    else:
        results, seen = trained([2.0 ** (step % 3) for step in range(steps)], steps)
    results.finite()
    if relative is not None:
        signs = [-1.0 if step % 4 in (1, 2) else 1.0 for step in range(steps)]
        (trained(signs, steps)[0] if error_feedback else results).near(relative)
    if residual is not None:
        results.first(steps).telescoping([one.residual for one in seen])
    if error_feedback and any(results.stays()):
        longer = max(4 * steps, LONG)
        trained([1.0] * longer, longer)[0].bounded()
    if seen[0].buckets < 2:
        raise Inconclusive(
            f"{seen[0].hook}: all gradients came in one bucket, so that the order of operations was not tried; "
            f"pass fewer bucket_bytes than {bucket_bytes}, or more shapes"
        )


@dataclass(frozen=True)
class Seen:
    """The gradients of one rank after each step, and the residual of its hook after one chosen step."""

    hook: str
    buckets: int
    steps: list[State]
    residual: dict[str, Tensor]


class _Model(nn.Module):
    """A model whose gradients are the arguments of forward; a parameter whose argument is None is not used."""

    def __init__(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes])

    def forward(self, *grads: Tensor | None) -> Tensor:
        parts = [(p * g.to(p.device)).sum().double() for p, g in zip(self.weights, grads, strict=True) if g is not None]
        return torch.stack(parts).sum()


def _torchs(module: nn.Module, bucket_bytes: int, find_unused: bool) -> Any:
    return DistributedDataParallel(module, bucket_cap_mb=bucket_bytes / 2**20, find_unused_parameters=find_unused)


def _given(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    world_size: int,
    factors: Sequence[float],
    seed: int,
    unused: int,
) -> Given:
    """Return the gradients of every rank, step and parameter.

    They are multiples of 1/16, so that sums are exact. Each rank has other values; each step multiplies them by one of
    ``factors``. Every parameter has elements of several magnitudes, and a mean that is not zero. Some parameters have
    no gradient in every other one of the first ``unused`` steps.
    """
    draws = torch.Generator().manual_seed(seed)
    given: Given = []
    for _ in range(world_size):
        one: list[Tensor] = []
        for shape, dtype in shapes:
            values = torch.randn(shape, generator=draws) * torch.randn(shape, generator=draws).exp() + 0.5
            one.append(((values * 16).round().clamp(-2048, 2048) / 16).to(dtype))
        given.append([[grad * factor for grad in one] for factor in factors])
    for step in range(1, unused, 2):
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
    looks_at: int,
) -> Seen:
    """Train under the hook on this rank; read the residual after ``looks_at`` steps."""
    model = _Model(shapes)
    ddp = wrap(model, bucket_bytes, unused)
    state, hook = _made(make_hook, model)
    places = []

    def counted(state: Any, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        places.append(bucket.index())
        return hook(state, bucket)

    ddp.register_comm_hook(state, counted)
    steps: list[State] = []
    held: dict[str, Tensor] = {}
    for grads in given[dist.get_rank()]:
        model.zero_grad()
        ddp(*grads).backward()
        steps.append({name: grad for name, grad in state_of(model, gradients=True).items() if name[:8] == "gradient"})
        if residual is not None and len(steps) == looks_at:
            held = {name: whole(tensor) for name, tensor in residual(state).items()}
    return Seen(name_of(hook), max(places, default=-1) + 1, steps, held)


_OWN_RESULTS = "ranks compute the result from what only they have, or met in different operations"


def _made(make_hook: MakeHook, model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the hook.

    A TypeError gets a note about ``make_hook``, because users may pass the hook itself.
    """
    try:
        made = make_hook(model)
    except TypeError as error:
        error.add_note(
            "make_hook is called as make_hook(module) and returns (state, hook), as lambda m: (None, hook) does"
        )
        raise
    state, hook = made_by_start(made, "state", "hook", by="make_hook")
    return state, hook


def _same_everywhere(who: str, everyone: list[list[State]], given: Given, facts: str) -> None:
    """Check that all ranks hold the same gradients, bit for bit, after every step."""
    __tracebackhide__ = True
    for step, states in enumerate(zip(*everyone, strict=True)):
        for name in differing([digest(state) for state in states]):
            place = list(states[0]).index(name)
            own = [grads[step][place] for grads in given]
            pairs = zip(own, (state[name] for state in states), strict=True)
            local = all(grad is not None and held is not None and torch.equal(grad, held) for grad, held in pairs)
            cause = explain(
                states,
                [Candidate.when("it is this rank's own gradient: never reduced", local)],
                hints=[Candidate.when(_OWN_RESULTS, True)],
            )
            for rank, state in enumerate(states[1:], start=1):
                require_bits(
                    f"{who}: replicas differ after step {step + 1}: rank {rank}",
                    name,
                    (state[name], states[0][name]),
                    "rank 0 holds",
                    Place(rank, step=step + 1),
                    likely_cause=cause,
                    case=facts,
                )
