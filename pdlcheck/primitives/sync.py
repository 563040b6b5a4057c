"""Keeping replicas alike: the same start, synchronised gradients, averaged models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pdlcheck.primitives.agreement import exchange, raise_first, require_agreement, require_same_rows
from pdlcheck.primitives.arguments import (
    Members,
    members,
    named_state,
    require_at_least,
    require_state,
    require_writable,
    wire_device,
)
from pdlcheck.primitives.averages import averages
from pdlcheck.primitives.broadcasts import broadcast_tensors
from pdlcheck.primitives.flat import flatten, gradient_dtype, sum_dtype, unflatten, wire_buckets
from pdlcheck.primitives.marks import are_alike, marks_of

__all__ = ["average_parameters", "broadcast_parameters", "sync_gradients", "sync_shares"]

BUCKET_BYTES = 25 * 2**20


def broadcast_parameters(
    module: nn.Module,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    by: Literal["broadcast", "messages"] = "broadcast",
) -> None:
    """Give every rank ``src``'s parameters and buffers, so that the replicas start alike.

    One broadcast, or one message to each sibling, for each device, after ranks have compared their models. Buffers that
    are not saved with the model are sent too; a tensor that is shared (tied weights) is sent once and stays shared.

    Args:
        module: same names, shapes and dtypes in the same order on every rank; overwritten on all ranks but ``src``.
        src: a global rank, must be in ``group``; the same on every rank.
        group: process group; ``None`` is the default group.
        by: ``"broadcast"`` is the backend's; with ``"messages"`` ``src`` sends to each sibling itself, which is slower
            from three ranks on, and needs of a backend nothing but send and recv. Of these two, the same on every rank.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: it has neither parameters nor buffers, or lazy or expanded ones, or some on a device that the
            backend cannot take; ``src`` is outside the group; unknown ``by``; models or ``src`` differ between ranks.
            On every rank alike, before anything is sent.

    Example:
        >>> def start():
        ...     model = nn.Linear(2, 1)         # every rank draws its own weights
        ...     broadcast_parameters(model)
        ...     return model.weight.tolist()
        >>> first, second = world.run(start, world_size=2)
        >>> first == second
        True

    Source: rank 0 sends its weights to its siblings in D. Gannon, "Doing Deep Learning in Parallel with
    PyTorch" (2020).
    """
    who = members("broadcast_parameters", group)
    state: dict[str, Tensor] = {}
    problem: Exception | None = None
    try:
        if by not in ("broadcast", "messages"):
            raise ValueError(f"broadcast_parameters knows by='broadcast' and by='messages', got {by!r}")
        state = _state_to_send(module, src, who)
    except (TypeError, ValueError) as error:
        problem = error
    rows = [(repr(n), f"{t.dtype} {tuple(t.shape)} on {t.device.type}") for n, t in state.items()]
    found = exchange((src, rows), problem, who.group, by_messages=by == "messages")
    raise_first(found, problem, who)
    for place, (theirs, _) in enumerate(found.values):
        if theirs != found.values[0][0]:
            raise ValueError(
                f"broadcast_parameters needs the same src on every rank, got {found.values[0][0]} on rank {who.at(0)} "
                f"and {theirs} on rank {who.at(place)}"
            )
    require_same_rows("broadcast_parameters", [rows for _, rows in found.values], who)
    broadcast_tensors(state.values(), src, group, by)


def sync_gradients(
    module_or_params: nn.Module | Iterable[Tensor],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    sync_every: int | None = 1,
    step: int = 0,
    weight: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Replace every gradient by its mean, or sum, over the ranks. Call it after backward, on every rank.

    With shards of ``n_r`` samples and a loss that is a mean over samples, ``weight=n_r`` gives
    ``sum(n_r * grad_r) / sum(n_r)``: the gradient of one process on all samples, also for uneven and empty
    shards.

    One all_reduce for each bucket of at most ``bucket_bytes``. The bucket also carries the weight, and a flag for
    each parameter: a gradient that is None on some ranks counts as zero there, and one that is None everywhere
    stays None. float16 and bfloat16 gradients are summed in float32.

    With ``sync_every`` above 1 every rank steps with its own gradient in between, and what it went alone is never
    taken back: replicas drift apart by the difference of those steps, and only :func:`average_parameters` or
    :class:`LocalSGD` reunites them.

    Args:
        module_or_params: a module, or its parameters in the same order on every rank.
        reduction: ``"mean"`` divides by the number of ranks, or by the sum of the weights; ``"sum"`` does
            not divide.
        sync_every: synchronise only at every k-th step: at steps k-1, 2k-1, ... counted from 0; ``None`` is never.
        step: the number of this step.
        weight: how much this rank's gradient counts, usually its number of samples; 0 for a rank without
            samples, whose gradients then do not count whatever they hold. Give it on every rank or on none.
        bucket_bytes: bytes in a bucket; a larger parameter has a bucket of its own.
        group: process group; ``None`` is the default group.

    Returns:
        True if this was a step that synchronises, the same on every rank.

    Raises:
        TypeError: something other than tensors is to be synchronised, or parameters come in a set, which
            has no order.
        ValueError: there is no parameter that requires a gradient; unknown ``reduction``; ``sync_every`` or
            ``bucket_bytes`` below 1; ``step`` below 0; ``weight`` negative, not finite or beside ``"sum"``;
            a sparse gradient. Where ranks synchronise, all of them raise, also where only one has this, or where
            ``reduction``, ``sync_every`` or ``bucket_bytes`` differ, or some give a weight; nothing is changed. A rank
            whose arguments are wrong waits for the next synchronisation of the others. One that has no parameters, lazy
            ones, or other ones, cannot take part, nor can one that never synchronises beside others that do.

    Example:
        >>> def step(samples):
        ...     model = nn.Linear(1, 1, bias=False)
        ...     model(torch.full((samples, 1), dist.get_rank() + 1.0)).mean().backward()
        ...     sync_gradients(model, weight=samples)
        ...     return model.weight.grad.item()
        >>> world.run(step, 3, world_size=2)
        [1.5, 1.5]

    Source: synchronous SGD as in "Distributed training with PyTorch and MPI" (2018); flat buckets as in S.
    Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 13 (2020).
    """
    params, problem = _trainable(module_or_params)  # without them nothing can be sent
    who = members("sync_gradients", group)
    params, unfit = _fit_to_send("sync_gradients", params, who)
    problem = problem or unfit
    # where only another argument is wrong, the messages are of the size of the others' all the same
    size = bucket_bytes if type(bucket_bytes) is int and bucket_bytes > 0 else BUCKET_BYTES
    share, way = 0.0, "no weight" if weight is None else "a weight"
    try:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"sync_gradients knows reduction 'mean' and 'sum', got {reduction!r}")
        if sync_every is not None:
            require_at_least("sync_gradients", "sync_every", sync_every, 1)
        require_at_least("sync_gradients", "step", step, 0)
        require_at_least("sync_gradients", "bucket_bytes", bucket_bytes, 1)
        share = _share(weight, reduction)
    except (TypeError, ValueError) as error:
        problem = problem or error
    if problem is not None and (sync_every is None or who.world_size == 1):
        raise problem
    if problem is None and (sync_every is None or (step + 1) % sync_every):
        return False
    # a rank with a problem meets the others in their next synchronisation, where all of them learn of it

    def facts() -> dict[str, object]:
        if problem is not None:
            raise problem
        return {"reduction": reduction, "sync_every": sync_every, "bucket_bytes": bucket_bytes, "way to count": way}

    marks = marks_of(problem, reduction, sync_every, bucket_bytes, way)
    sync_shares(
        list(params.values()),
        share if problem is None else 0.0,
        reduction=reduction,
        bucket_bytes=size,
        group=group,
        marks=marks,
        refuse=lambda: require_agreement("sync_gradients", who, facts),
    )
    return True


def sync_shares(
    params: Sequence[Tensor],
    share: float,
    *,
    reduction: str = "mean",
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
    marks: Sequence[float] = (),
    refuse: Callable[[], None] | None = None,
) -> float:
    """What :func:`sync_gradients` does once its arguments are right; returns the sum of the ranks' shares.

    ``marks`` travel in the first bucket; where those of all ranks are not alike ``refuse`` raises, on every rank.
    """
    if dist.get_world_size(group) == 1:  # its own mean, and its own sum
        if not share:
            for param in params:
                param.grad = None
        return share
    total = 0.0
    for bucket in wire_buckets(params, sum_dtype, bucket_bytes):
        total = _sync_bucket([params[position] for position in bucket], reduction, share, group, marks, refuse)
        marks = ()
    return total


def average_parameters(
    module: nn.Module,
    *,
    buffers: Literal["average", "broadcast", "keep"] = "average",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace every parameter by its mean over the ranks, as local SGD does between rounds of its own steps.

    One all_reduce for each dtype; float16 and bfloat16 are summed in float32. A mean of integers is exact or an
    error, it is never rounded: a counter that is 3 on one rank and 4 on another has no integer mean.

    Args:
        module: same structure, shapes and dtypes on every rank; overwritten on every rank.
        buffers: ``"average"`` averages them too, ``"broadcast"`` takes those of the group's first rank,
            ``"keep"`` leaves each rank its own.
        group: process group; ``None`` is the default group.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: it has neither parameters nor buffers, or lazy ones; on every rank alike, before anything is
            changed: some on a device that the backend cannot take, or DTensors; unknown ``buffers`` or others on
            another rank (where these make no messages of another size); integers that have no integer mean.

    Example:
        >>> def average():
        ...     model = nn.Linear(1, 1)
        ...     nn.init.constant_(model.weight, float(dist.get_rank()))
        ...     average_parameters(model)
        ...     return model.weight.item()
        >>> world.run(average, world_size=2)
        [0.5, 0.5]

    Source: weights divided by the number of ranks after an all_reduce in D. Gannon (2020); S. Stich,
    "Local SGD converges fast and communicates little", ICLR (2019).
    """
    parameters, own_buffers = named_state("average_parameters", module)
    who = members("average_parameters", group)
    state, problem = _fit_to_send("average_parameters", {**parameters, **own_buffers}, who)
    if buffers not in ("average", "broadcast", "keep"):
        problem = problem or ValueError(
            f"average_parameters knows buffers 'average', 'broadcast' and 'keep', got {buffers!r}"
        )
    chosen = {n: state[n] for n in parameters} if buffers in ("broadcast", "keep") else state
    marks = marks_of(problem, buffers)

    def facts() -> dict[str, object]:
        if problem is not None:
            raise problem
        return {"buffers": buffers}

    def require_alike(sums: Sequence[float]) -> None:
        if not are_alike(marks, sums, who.world_size):
            require_agreement("average_parameters", who, facts)

    means, _ = averages("average_parameters", chosen, who.world_size, group, tail=marks, check=require_alike)
    for name, average in means.items():
        chosen[name].detach().copy_(average)
    if buffers == "broadcast" and own_buffers:
        broadcast_tensors(own_buffers.values(), who.at(0), group)


def _sync_bucket(
    params: list[Tensor],
    reduction: str,
    share: float,
    group: dist.ProcessGroup | None,
    marks: Sequence[float],
    refuse: Callable[[], None] | None,
) -> float:
    dtype = sum_dtype(params[0].dtype)
    grads = [p.grad if share > 0 else None for p in params]
    values = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
    flags = [0.0 if g is None else 1.0 for g in grads]
    tail = torch.tensor([*marks, *flags, share], dtype=dtype, device=params[0].device)
    flat = flatten([*values, tail], dtype)
    summed = flat[: -len(tail)]
    if share not in (0, 1):
        summed *= share
    dist.all_reduce(flat, group=group)
    *present, total = flat[-len(tail) :].real.tolist()
    if marks and refuse is not None and not are_alike(marks, present[: len(marks)], dist.get_world_size(group)):
        refuse()
    if reduction == "mean" and total > 0:
        summed /= total
    for param, somewhere, result in zip(params, present[len(marks) :], unflatten(summed, params), strict=True):
        if not somewhere:
            param.grad = None
        elif param.grad is None:
            param.grad = torch.empty_like(param, dtype=gradient_dtype(param)).copy_(result)
        else:
            param.grad.copy_(result)
    return float(total)


def _state_to_send(module: nn.Module, src: int, who: Members) -> dict[str, Tensor]:
    parameters, buffers = named_state("broadcast_parameters", module)
    who.place_of("broadcast_parameters", src)
    state = {**parameters, **buffers}
    require_state("broadcast_parameters", state, who.group)
    require_writable("broadcast_parameters", state)
    return state


def _fit_to_send(caller: str, tensors: dict[str, Tensor], who: Members) -> tuple[dict[str, Tensor], ValueError | None]:
    """The tensors, or zeros in place of those that cannot be sent, so that the others hear what is wrong with them.

    Raises:
        ValueError: one has no shape yet, so that nothing can stand in for it.
    """
    try:
        require_state(caller, tensors, who.group)
    except ValueError as error:
        if any(is_lazy(tensor) for tensor in tensors.values()):
            raise
        device = wire_device(who.group)
        return {n: torch.zeros(tuple(t.shape), dtype=t.dtype, device=device) for n, t in tensors.items()}, error
    return tensors, None


def _trainable(module_or_params: nn.Module | Iterable[Tensor]) -> tuple[dict[str, Tensor], Exception | None]:
    """What requires a gradient, by name, each once, and what is wrong with a gradient, if anything.

    The name of a bare parameter is its position.
    """
    problem: Exception | None = None
    if isinstance(module_or_params, nn.Module):
        named: Iterable[tuple[str, Tensor]] = module_or_params.named_parameters()
    elif isinstance(module_or_params, set | frozenset):
        raise TypeError("sync_gradients got parameters in a set, whose order differs between ranks; pass a list")
    else:
        named = ((str(position), p) for position, p in enumerate(module_or_params))
    found: dict[int, tuple[str, Tensor]] = {}
    for name, param in named:
        if not isinstance(param, Tensor):
            raise TypeError(f"sync_gradients takes a module or its parameters, got {type(param).__name__}")
        if param.grad is not None and param.grad.layout != torch.strided:
            problem = problem or ValueError(
                f"sync_gradients needs dense gradients, parameter {name!r} has layout {param.grad.layout}; "
                "build the embedding with sparse=False"
            )
        if param.requires_grad:
            found.setdefault(id(param), (name, param))
    if not found:
        raise ValueError(
            "sync_gradients got an empty model: no parameter requires a gradient; "
            "pass a module, or a list of parameters (a generator is used up by its first reader)"
        )
    return dict(found.values()), problem


def _share(weight: float | None, reduction: str) -> float:
    """The factor of this rank's gradients."""
    if weight is None:
        return 1.0
    if reduction == "sum":
        raise ValueError("sync_gradients takes weight with reduction='mean' only; a sum is not weighted")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"sync_gradients needs a finite weight that is not negative, got weight={weight}")
    return float(weight)
