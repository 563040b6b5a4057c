"""Functions that keep replicas equal: broadcast parameters, synchronise gradients, average models."""

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
from pdlcheck.primitives.settings_fingerprint import all_equal, marks_of

__all__ = ["average_parameters", "broadcast_parameters", "sync_gradients", "sync_shares"]

BUCKET_BYTES = 25 * 2**20


def broadcast_parameters(
    module: nn.Module,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    *,
    by: Literal["broadcast", "messages"] = "broadcast",
) -> None:
    """Copy ``src``'s parameters and buffers to every rank, so that the replicas start equal.

    The ranks compare their models first. Then each device costs one broadcast, or one message to each sibling. Buffers
    that are not saved with the model are sent too. A shared tensor (tied weights) is sent once and stays shared.

    Args:
        module: same names, shapes and dtypes in the same order on every rank; overwritten on all ranks except ``src``.
        src: a global rank in ``group``; the same on every rank.
        group: process group; ``None`` is the default group.
        by: ``"broadcast"`` uses the backend's broadcast. With ``"messages"``, ``src`` sends to each sibling itself;
            this is slower from three ranks on, but needs only send and recv of the backend. Same value on every rank.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: ``module`` has no parameters and no buffers, or has lazy or expanded ones, or has some on a device
            that the backend does not support; ``src`` is outside the group; ``by`` is unknown; models or ``src`` differ
            between ranks. Every rank raises the same error, before any tensor is sent.

    Example:
        >>> def start():
        ...     model = nn.Linear(2, 1)         # every rank draws its own weights
        ...     broadcast_parameters(model)
        ...     return model.weight.tolist()
        >>> first, second = world.run(start, world_size=2)
        >>> first == second
        True

    Source: rank 0 sends its weights to its siblings in D. Gannon, "Doing Deep Learning in Parallel with PyTorch"
    (2020).
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
    ``sum(n_r * grad_r) / sum(n_r)``. This is the gradient of one process on all samples, even if shards are uneven or
    empty.

    The cost is one all_reduce for each bucket of at most ``bucket_bytes``. The bucket also carries the weight, and a
    flag for each parameter. A gradient that is None on some ranks counts as zero there. One that is None on every rank
    stays None. float16 and bfloat16 gradients are summed in float32.

    With ``sync_every`` above 1, every rank takes the steps in between with its own gradient. These steps are never
    undone, so the replicas drift apart by their difference. Only :func:`average_parameters` or :class:`LocalSGD` makes
    them equal again.

    Args:
        module_or_params: a module, or its parameters in the same order on every rank.
        reduction: ``"mean"`` divides by the number of ranks, or by the sum of the weights; ``"sum"`` does not divide.
        sync_every: synchronise only at every k-th step: at steps k-1, 2k-1, ... counted from 0; ``None`` is never.
        step: the number of this step.
        weight: the weight of this rank's gradient, usually its number of samples. A rank without samples gives 0; its
            gradients are then ignored. Give a weight on every rank or on none.
        bucket_bytes: bytes in a bucket; a larger parameter has a bucket of its own.
        group: process group; ``None`` is the default group.

    Returns:
        True if this step synchronises; the same on every rank.

    Raises:
        TypeError: something other than tensors is to be synchronised, or parameters come in a set, which has no order.
        ValueError: no parameter requires a gradient; ``reduction`` is unknown; ``sync_every`` or ``bucket_bytes`` is
            below 1; ``step`` is below 0; ``weight`` is negative, not finite, or given with ``"sum"``; a gradient is
            sparse; ranks differ in ``reduction``, ``sync_every`` or ``bucket_bytes``; some ranks give a weight and
            others do not. If the ranks synchronise, every rank raises, even if only one has the problem, and nothing is
            changed. A rank with wrong arguments waits for the next synchronisation of the others. The ranks cannot
            share the error in two cases: a rank has no parameters, lazy ones or different ones; or a rank never
            synchronises while others do.

    Example:
        >>> def step(samples):
        ...     model = nn.Linear(1, 1, bias=False)
        ...     model(torch.full((samples, 1), dist.get_rank() + 1.0)).mean().backward()
        ...     sync_gradients(model, weight=samples)
        ...     return model.weight.grad.item()
        >>> world.run(step, 3, world_size=2)
        [1.5, 1.5]

    Source: synchronous SGD as in "Distributed training with PyTorch and MPI" (2018); flat buckets as in S. Li et al.,
    "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 13 (2020).
    """
    params, problem = _trainable(module_or_params)  # raises at once: without parameters nothing can be sent
    who = members("sync_gradients", group)
    params, unfit = _fit_to_send("sync_gradients", params, who)
    problem = problem or unfit
    # If another argument is wrong, this rank still sends messages of the same size as its peers.
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
    # A rank with a problem joins the next synchronisation of the others, where every rank detects the problem.

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
    """Synchronise gradients as :func:`sync_gradients` does, without its argument checks.

    Args:
        params: the parameters, in the same order on every rank.
        share: the factor of this rank's gradients; 0 ignores them.
        reduction: ``"mean"`` or ``"sum"``.
        bucket_bytes: bytes in a bucket.
        group: process group; ``None`` is the default group.
        marks: numbers that travel in the first bucket and must be equal on every rank.
        refuse: called on every rank if the marks differ; raises on every rank.

    Returns:
        The sum of the ranks' shares.
    """
    if dist.get_world_size(group) == 1:  # the gradient of one rank is its own mean and its own sum
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
    """Replace every parameter by its mean over the ranks, as local SGD does after each round of local steps.

    The cost is one all_reduce for each dtype. float16 and bfloat16 are summed in float32. A mean of integers is exact
    or an error; it is never rounded. For example, a counter that is 3 on one rank and 4 on another has no integer mean.

    Args:
        module: same structure, shapes and dtypes on every rank; overwritten on every rank.
        buffers: ``"average"`` averages the buffers too, ``"broadcast"`` copies those of the group's first rank,
            ``"keep"`` leaves each rank's buffers unchanged.
        group: process group; ``None`` is the default group.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: ``module`` has no parameters and no buffers, or has lazy ones. The following errors are raised on
            every rank alike, before anything is changed: a tensor is a DTensor or on a device that the backend does not
            support; ``buffers`` is unknown or differs between ranks (detected if the messages still have the same
            size); integers have no integer mean.

    Example:
        >>> def average():
        ...     model = nn.Linear(1, 1)
        ...     nn.init.constant_(model.weight, float(dist.get_rank()))
        ...     average_parameters(model)
        ...     return model.weight.item()
        >>> world.run(average, world_size=2)
        [0.5, 0.5]

    Source: weights divided by the number of ranks after an all_reduce in D. Gannon (2020); S. Stich, "Local SGD
    converges fast and communicates little", ICLR (2019).
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
        if not all_equal(marks, sums, who.world_size):
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
    if marks and refuse is not None and not all_equal(marks, present[: len(marks)], dist.get_world_size(group)):
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
    """Return the tensors and ``None``; or, if some cannot be sent, zeros in their place and the error.

    With the zeros this rank still takes part, so that the other ranks receive its error.

    Raises:
        ValueError: a tensor has no shape yet, so no zeros can replace it.
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
    """Return the parameters that require a gradient, by name and each once, and the first problem of a gradient.

    The name of a bare parameter is its position. The problem is ``None`` if every gradient is dense.
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
    """Return the factor of this rank's gradients."""
    if weight is None:
        return 1.0
    if reduction == "sum":
        raise ValueError("sync_gradients takes weight with reduction='mean' only; a sum is not weighted")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"sync_gradients needs a finite weight that is not negative, got weight={weight}")
    return float(weight)
