"""The checks that replicas start alike and stay alike, bit for bit.

Every rank starts with other random numbers. So equal values after the call are equal because the code made them equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks.conditions import BUCKETS, meet
from pdlcheck.checks.evidence.exchanges import Exchange, exchange_of, record_exchanges
from pdlcheck.checks.message import Place, case, failure, made_by_start, name_of, takes_world
from pdlcheck.checks.replicas.causes import Differing, diagnose
from pdlcheck.checks.state import State, differing, digest, made_by, plain_name, require_bits, state_of
from pdlcheck.compat.torch.data_parallel import ignored_names, wrapped_parameters
from pdlcheck.errors import Inconclusive

__all__ = ["Look", "check_replicas_in_sync", "check_same_start", "require_in_sync"]

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
        meet(_conditions(first.calls))
        return
    when = "before the first step" if first.where == 0 else f"after step {first.where * look.sync_every}"
    values, exchanges = [trace.value for trace in traces], [trace.exchanges for trace in traces]
    seen = Differing(
        first.where,
        first.names,
        look.gradients,
        values,
        exchanges,
        first.lacking,
        first.earlier,
        look.sync_every,
        first.unwrapped,
    )
    _raise_where_replicas_differ(
        f"{who}: replicas differ {when}",
        values,
        first.names,
        buffers=_only_buffers(first.where, values, first.names),
        likely_cause=diagnose(seen),
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
    differ. ``moved`` is True if a parameter changed. ``calls`` are the numbers of collectives before each recorded
    state. ``exchanges`` are what the rank exchanged before this state and before the one recorded earlier, empty if
    unknown. ``lacking`` are the parameters without a gradient that had one then, with their numbers of elements.
    ``earlier`` are the ranks that hold the parameters of an earlier state, each with the number of that state.
    ``unwrapped`` are the parameters that torch's DistributedDataParallel does not reduce, although its module has them.
    """

    where: int | None
    names: list[str]
    value: State
    moved: bool
    calls: Sequence[int] = ()
    exchanges: Sequence[Exchange] = ()
    lacking: Mapping[str, int] = field(default_factory=dict)
    earlier: Mapping[int, int] = field(default_factory=dict)
    unwrapped: Sequence[str] = ()


def _trace(start: Start, look: Look, seed: int) -> Trace:
    """Train on one rank, record the states, and compare digests, so that a rank sends only tensors that differ."""
    torch.manual_seed(seed + dist.get_rank())
    module, step = made_by_start(start(), "model", "step")
    seen = [state_of(module, buffers=look.buffers, gradients=look.gradients)]
    starts = [0]
    with record_exchanges() as posted:
        for i in range(look.steps):
            step(i)
            if (i + 1) % look.sync_every == 0:
                seen.append(state_of(module, buffers=look.buffers, gradients=look.gradients))
                starts.append(len(posted or ()))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [digest(state) for state in seen])
    for where, states in enumerate(zip(*everyone, strict=True)):
        names = differing(list(states))
        if names:
            alike = [name for name in seen[where] if name.startswith("gradient") and name not in names]
            value = {name: seen[where].get(name) for name in [*names, *alike]}
            windows = [posted[start:end] for start, end in pairwise(starts)] if posted is not None else []
            exchanges = [exchange_of(one) for one in reversed(windows[max(0, where - 2) : where])]
            return Trace(
                where,
                names,
                value,
                moved=True,
                exchanges=exchanges,
                lacking=_lacking(seen[: where + 1]),
                earlier=_earlier(everyone, where, [name for name in names if name.startswith("parameter")]),
                unwrapped=_unwrapped(module),
            )
    first, last = digest(seen[0]), digest(seen[-1])
    moved = any(first[name] != last.get(name) for name in first if name.startswith("parameter"))
    calls = [sum(exchange_of(posted[start:end]).calls.values()) for start, end in pairwise(starts)] if posted else []
    return Trace(None, [], {}, moved, calls)


def _earlier(digests: Sequence[Sequence[Mapping[str, str]]], where: int, names: Sequence[str]) -> dict[int, int]:
    """Return the ranks whose parameters are those of an earlier state of any rank, each with that state's number."""
    held = [[tuple(state.get(name) for name in names) for state in states[: where + 1]] for states in digests]
    then = {parameters: number for number in range(where) for parameters in (own[number] for own in held)}
    return {rank: then[own[where]] for rank, own in enumerate(held) if names and own[where] in then}


def _unwrapped(module: nn.Module) -> list[str]:
    """Return the parameters in a wrapper of torch's that require a gradient, and that it does not know."""
    names: list[str] = []
    for prefix, one in module.named_modules():
        if isinstance(one, DistributedDataParallel):
            known = {id(parameter) for parameter in wrapped_parameters(one)}
            ignored = {f"module.{name}" for name in ignored_names(one.module)}
            names += [
                f"parameter {plain_name(f'{prefix}.{name}'.lstrip('.'))!r}"
                for name, parameter in one.named_parameters()
                if parameter.requires_grad and id(parameter) not in known and name not in ignored
            ]
    return names


def _conditions(calls: Sequence[int]) -> dict[str, bool]:
    """Return the conditions that replicas can meet, and whether they have met them."""
    rounds = [count for count in calls if count]
    met = {BUCKETS: max(rounds) > 2} if rounds else {}
    if 0 < len(rounds) < len(calls):
        met["two rounds of synchronisation"] = len(rounds) > 1
    return met


def _lacking(seen: Sequence[State]) -> dict[str, int]:
    """Return the parameters whose gradient is None in the last state and was there in the one before."""
    if len(seen) < 2:
        return {}
    before, now = seen[-2:]
    gradients = [name for name in now if name.startswith("gradient of ") and now[name] is None]
    gone = {name.removeprefix("gradient of "): before.get(name) for name in gradients}
    return {name: gradient.numel() for name, gradient in gone.items() if gradient is not None}


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
