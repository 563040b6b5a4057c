"""The checks that replicas start alike and stay alike, bit for bit.

Every rank starts with other random numbers. So equal values after the call are equal because the code made them equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.message import Place, case, failure, made_by_start, name_of, takes_world
from pdlcheck.checks.state import State, differing, digest, made_by, require_bits, state_of
from pdlcheck.errors import Inconclusive

__all__ = ["Look", "check_replicas_in_sync", "check_same_start", "require_in_sync"]

_ONLY_GRADIENTS = (
    "; parameters are alike: right for a step that reduces gradients into memory of its own, as ZeRO does, or averages "
    "models, which gradients=False accepts, or that accumulates them for a later one, which sync_every= accepts"
)
_WHOLE = (
    "give as model what each rank holds whole, such as a plain copy that start and step fill within "
    "summon_full_params(); what fully_shard divides is compared whole"
)
_FLAT = f"these are shards, not replicas: each rank holds a part of a flat tensor, as under FSDP1; {_WHOLE}"
_SHAPES = f"shapes differ: ranks made other models, or these are shards, not replicas; then {_WHOLE}"

Start = Callable[[], tuple[nn.Module, Callable[[int], object]]]


@takes_world
def check_replicas_in_sync(
    start: Start,
    world: Any,
    *,
    world_size: int = 3,
    steps: int = 3,
    sync_every: int = 1,
    buffers: bool = True,
    gradients: bool = True,
    seed: int = 0,
) -> None:
    """Check that all ranks hold the same model, bit for bit, before the first step and after every step.

    Args:
        start: called on every rank, under different random numbers; returns the model and ``step(i)``, which takes
            training step i (0, 1, ...) on this rank with everything that belongs to it.
        world: where the ranks run.
        world_size: number of replicas, 2 or more.
        steps: steps to take; 0 compares the start only.
        sync_every: compare after every k-th step. Local SGD lets replicas differ in between, and so do gradients that
            accumulate over k steps.
        buffers: compare buffers too; False if each rank keeps statistics of its own data by intention.
        gradients: compare gradients too; False if they stay local by intention, as in local SGD, and under ZeRO, where
            reduced gradients are not in ``.grad``.
        seed: rank r draws from ``seed + r``.

    Raises:
        AssertionError: names the first step, tensor, rank and index that differ, and the likely cause.
        Inconclusive: no parameter changed in any step, so no fault could show.

    Example:
        >>> from pdlcheck.primitives import broadcast_parameters, sync_gradients
        >>> from pdlcheck.worlds import get_world
        >>> def start():
        ...     model = nn.Linear(2, 1)
        ...     broadcast_parameters(model)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def step(i):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(4, 2)).square().mean().backward()
        ...         sync_gradients(model)
        ...         optimizer.step()
        ...     return model, step
        >>> check_replicas_in_sync(start, get_world("sim"), world_size=2)
    """
    __tracebackhide__ = True
    look = Look(steps, sync_every, buffers, gradients)
    require_in_sync(name_of(start), start, world, look, world_size=world_size, seed=seed)


def require_in_sync(who: str, start: Start, world: Any, look: Look, *, world_size: int, seed: int) -> None:
    """Check replicas as :func:`check_replicas_in_sync` does.

    ``who`` begins the messages, and ``look`` says what is compared after which steps.
    """
    __tracebackhide__ = True
    if world_size < 2:
        raise ValueError(f"check_replicas_in_sync compares ranks, it needs world_size 2 or more, got {world_size}")
    traces = world.run(_trace, start, look, seed, world_size=world_size)
    every = look.sync_every if look.sync_every > 1 else None
    facts = case(world, world_size, steps=look.steps, sync_every=every, seed=seed)
    first: Trace = traces[0]
    if first.where is None:
        if look.steps and not first.moved:
            raise Inconclusive(f"{who}: no parameter changed in {look.steps} steps, the check saw nothing")
        return
    when = "before the first step" if first.where == 0 else f"after step {first.where * look.sync_every}"
    _raise_where_replicas_differ(
        f"{who}: replicas differ {when}",
        [trace.value for trace in traces],
        first.names,
        buffers=_only_buffers(first.where, [trace.value for trace in traces], first.names),
        likely_cause=_cause(first.where, first.names, look.gradients, [trace.value for trace in traces]),
        case=facts,
    )


@takes_world
def check_same_start(make: Callable[[], nn.Module], world: Any, *, world_size: int = 3, seed: int = 0) -> None:
    """Check that all ranks make the same model, bit for bit, buffers included, though each draws other random numbers.

    Args:
        make: called on every rank; returns the model as it is when training starts.
        world: where the ranks run.
        world_size: number of replicas, 2 or more.
        seed: rank r draws from ``seed + r``.
    """
    __tracebackhide__ = True

    def start() -> tuple[nn.Module, Callable[[int], object]]:
        return made_by(make), print

    require_in_sync(name_of(make), start, world, Look(0), world_size=world_size, seed=seed)


@dataclass(frozen=True)
class Look:
    """The number of steps, those after which each replica is recorded, and the kinds of tensors to record."""

    steps: int
    sync_every: int = 1
    buffers: bool = True
    gradients: bool = True


@dataclass(frozen=True)
class Trace:
    """The first recorded state in which ranks differ, or None for ``where`` if none does.

    ``names`` are the tensors that differ. ``value`` holds this rank's values of them, and of the gradients that do not
    differ. ``moved`` is True if a parameter changed.
    """

    where: int | None
    names: list[str]
    value: State
    moved: bool


def _trace(start: Start, look: Look, seed: int) -> Trace:
    """Train on one rank, record the states, and compare digests, so that a rank sends only tensors that differ."""
    torch.manual_seed(seed + dist.get_rank())
    module, step = made_by_start(start(), "model", "step")
    seen = [state_of(module, buffers=look.buffers, gradients=look.gradients)]
    for i in range(look.steps):
        step(i)
        if (i + 1) % look.sync_every == 0:
            seen.append(state_of(module, buffers=look.buffers, gradients=look.gradients))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [digest(state) for state in seen])
    for where, states in enumerate(zip(*everyone, strict=True)):
        names = differing(list(states))
        if names:
            alike = [name for name in seen[where] if name.startswith("gradient") and name not in names]
            return Trace(where, names, {name: seen[where].get(name) for name in [*names, *alike]}, moved=True)
    first, last = digest(seen[0]), digest(seen[-1])
    moved = any(first[name] != last.get(name) for name in first if name.startswith("parameter"))
    return Trace(None, [], {}, moved)


def _raise_where_replicas_differ(when: str, values: list[State], names: list[str], **details: object) -> None:
    __tracebackhide__ = True
    kinds = [kind for kind in ("parameter", "gradient", "buffer") if any(n.startswith(kind) for n in names)]
    name = next(n for n in names if n.startswith(kinds[0]))
    counts = ", ".join(f"{sum(n.startswith(kind) for n in names)} {kind}(s)" for kind in kinds)
    for rank, state in enumerate(values[1:], start=1):
        require_bits(
            f"{when}: rank {rank}",
            name,
            (state.get(name), values[0].get(name)),
            "rank 0 holds",
            Place(rank),
            tensors=counts,
            **details,
        )
    raise failure(f"{when}: {name} is not there on every rank", tensors=counts, **details)


def _only_buffers(where: int, values: list[State], names: list[str]) -> str | None:
    """Describe the buffers that differ after a step, and their ranks, if nothing else differs."""
    if where == 0 or not all(name.startswith("buffer") for name in names):
        return None
    digests = [digest(state) for state in values]
    told = [
        f"{name.removeprefix('buffer ')} on ranks "
        f"{[rank for rank, held in enumerate(digests) if held.get(name) != digests[0].get(name)]}"
        for name in names[:3]
    ]
    return (
        f"{', '.join(told)}{', ...' if len(names) > 3 else ''} differ from rank 0's, parameters are alike: "
        "right only for statistics of a rank's own data, which buffers=False accepts"
    )


def _cause(where: int, names: list[str], gradients: bool, values: list[State]) -> str | None:
    kinds = {name.split()[0] for name in names}
    if kinds == {"buffer"}:
        if where == 0:
            return "only buffers differ: they were not broadcast, or were changed on some rank after the broadcast"
        return None
    if any("_flat_param" in name for name in names):
        return _FLAT
    if _shapes_differ(names, values):
        return _SHAPES
    if where == 0:
        return "initial weights were not broadcast, or were changed on some rank after the broadcast"
    if "gradient" in kinds:
        alone = _ONLY_GRADIENTS if kinds == {"gradient"} else ""
        factors = _factors(values)
        if factors:
            told = ", ".join(f"rank {rank}: {factor:.6g}" for rank, factor in enumerate(factors))
            return (
                f"all gradients of a rank are one factor times those of rank 0 ({told}): scaled by a value of that "
                f"rank after they were synchronised, or not synchronised where losses differ by that factor{alone}"
            )
        return (
            "gradients differ: they were not synchronised on all ranks, or not all of them, or changed "
            f"afterwards{alone}"
        )
    if not gradients:
        return "models were not averaged on all ranks, or not at this step"
    if all(grad is None for name, grad in values[0].items() if name.startswith("gradient")):
        return (
            "no gradients are left to look at: they were not synchronised, or what uses them differs between ranks; "
            "zero_grad() before the backward pass, not after the step, lets this check tell"
        )
    if all(values[0].get(name.replace("parameter", "gradient of", 1)) is None for name in names):
        return "no gradient reaches them: what else changes them, such as an average of weights, differs between ranks"
    return (
        "gradients agree: optimizer states or learning rates differ, or on some rank the step was not taken, or "
        "weights were changed"
    )


def _shapes_differ(names: list[str], values: list[State]) -> bool:
    held = [[state.get(name) for state in values] for name in names if name.startswith("parameter")]
    return any(len({tensor.shape for tensor in tensors if tensor is not None}) > 1 for tensors in held)


def _factors(values: list[State]) -> list[float]:
    """Return, for each rank, its gradients' factor relative to those of rank 0; empty if a rank has no such factor."""
    grads = [
        [grad for name, grad in state.items() if grad is not None and name.startswith("gradient")] for state in values
    ]
    everyone = [torch.cat([_real(grad).flatten() for grad in own] or [torch.zeros(0)]) for own in grads]
    first = everyone[0]
    if any(one.shape != first.shape for one in everyone) or first.count_nonzero() < 2:
        return []  # a single number is always a factor times another
    rounding = 4 * max(torch.finfo(grad.dtype).eps for grad in grads[0])
    factors = [float(one.dot(first) / first.dot(first)) for one in everyone]
    pairs = zip(everyone, factors, strict=True)
    return factors if all(f > 0 and torch.allclose(one, f * first, rtol=rounding, atol=0) for one, f in pairs) else []


def _real(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
