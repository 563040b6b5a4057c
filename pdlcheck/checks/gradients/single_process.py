"""The check that replicas on their shards get the gradient of one process on the union of the shards.

The check computes in float64 by default, on one model for every rank, so that only the synchronisation can be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.gradients.causes import Causes
from pdlcheck.checks.gradients.no_gradients import naming_parameters_without_gradient
from pdlcheck.checks.gradients.truth import Gradients, Loss, Reference, Shard, or_zero, reference_of
from pdlcheck.checks.message import (
    Place,
    best_fit,
    case,
    failure,
    first_index,
    name_of,
    show,
    takes_world,
    wrong_on_ranks,
)
from pdlcheck.checks.state import in_dtype, made_wide, wants_another_dtype, whole
from pdlcheck.checks.tolerances import require_dtype
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_gradients_equal_single_process", "require_gradients"]

_ALL_CAST = (
    "the check casts the whole model to {dtype}, frozen layers too, and the data: cast what else takes part to the "
    "dtype of the weights, not to a fixed one"
)

AGAIN = 2.0  # the loss factor of the second call, so that a leftover of the first call gives a wrong result


@takes_world
def check_gradients_equal_single_process(
    make: Callable[[], nn.Module],
    loss: Loss,
    shards: Sequence[Shard],
    sync: Callable[[nn.Module, int], object],
    world: Any,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> None:
    """Check that after ``sync`` every rank holds the gradient of ``loss`` on all samples together.

    A gradient that is None counts as zero. An element may be off by 1e-9 of the largest element of its gradient on any
    shard or on the union, plus 1e-12 of the largest element of all gradients. Sums in another order differ by about
    1e-13, and a wrong weight changes a gradient by 1e-3 or more. In float32 the tolerances are 2e-5 and 1e-7.

    Args:
        make: makes the plain model. The check calls it once, outside of the ranks, casts the model to ``dtype`` and
            copies it to every rank. The samples of the model must not affect each other, as they do in batch norm,
            unless ``sync`` or the model compensates for that. For a function that wraps a model use
            :func:`check_data_parallel`.
        loss: ``loss(model(inputs), targets)``, a mean or a sum over samples. A module is cast to ``dtype``, too.
        shards: inputs and targets of each rank, first dimension is samples. Uneven and empty shards find the most
            faults. A rank without samples has no gradient (None) when it calls ``sync``. If the model communicates, as
            synchronised batch norm does, the rank takes part with an empty batch inside ``sync``.
        sync: called as ``sync(model, num_samples)`` on every rank after backward. It is called again on the same model
            after a backward pass of twice the loss: no leftover of the first call may be in the result.
        world: where the ranks run.
        dtype: dtype of all computations; float32 if ``sync`` or the model casts to it.
        seed: seed of the initial weights.

    Raises:
        AssertionError: a gradient is wrong. The message names rank, parameter, index and the likely cause: summed
            instead of averaged, never synchronised, rank 0's shard, unweighted mean of uneven shards, a leftover of an
            earlier call.
        Inconclusive: the gradient on the union is zero, there are no samples, or the model draws random numbers.

    Example:
        >>> from pdlcheck.primitives import sync_gradients
        >>> from pdlcheck.worlds import get_world
        >>> def sync(model, num_samples):
        ...     sync_gradients(model, weight=num_samples)
        >>> shards = [(torch.randn(n, 2), torch.randn(n, 1)) for n in (3, 1, 0)]
        >>> world = get_world("sim")
        >>> check_gradients_equal_single_process(lambda: nn.Linear(2, 1), nn.MSELoss(), shards, sync, world)
    """
    __tracebackhide__ = True
    require_dtype("check_gradients_equal_single_process", dtype)
    require_gradients(make, loss, shards, sync, world, dtype=dtype, seed=seed, again=True)


def require_gradients(
    make: Callable[[], nn.Module],
    loss: Loss,
    shards: Sequence[Shard],
    sync: Callable[[nn.Module, int], object],
    world: Any,
    *,
    dtype: torch.dtype,
    seed: int,
    again: bool,
    who: str | None = None,
    note: str | None = None,
) -> None:
    """Check the gradients as :func:`check_gradients_equal_single_process` does.

    ``again``: call ``sync`` twice, as that check does. Pass False for a ``sync`` that runs its own forward and backward
    passes, as in the checks of wrappers. ``who`` begins the messages; None is the name of ``sync``. ``note`` is added
    to an error of the run, raised by a rank or by the world.
    """
    __tracebackhide__ = True
    who = name_of(sync) if who is None else who
    shards = _pairs(shards)
    shards = [(_cast(x, dtype), _cast(y, dtype)) for x, y in shards]
    sizes = [len(x) for x, _ in shards]
    if not sum(sizes):
        raise Inconclusive(f"{who}: no rank has a sample, there is no gradient to compare")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made_wide(make)
        model = model if dtype is torch.float64 else model.to(dtype)
    try:
        everyone: list[list[Gradients]] = world.run(
            _synchronised, model, loss, shards, sync, again, who, dtype, world_size=len(shards)
        )
    except Exception as error:
        if isinstance(error, RuntimeError) and wants_another_dtype(error):
            error.add_note(_ALL_CAST.format(dtype=str(dtype).removeprefix("torch.")))
        if note is not None:
            error.add_note(note)
        raise
    loss = in_dtype(loss, dtype)
    reference = reference_of(model, loss, shards, dtype)
    if not any(grad is not None and grad.any() for grad in reference.union.values()):
        raise Inconclusive(f"{who}: the gradient on all samples is zero, no fault would show")
    facts = case(world, len(shards), samples=sizes, seed=seed)
    try:
        _require_equal(f"{who}:", reference, [calls[0] for calls in everyone], facts)
        if all(len(calls) > 1 for calls in everyone):
            second = f"{who}: in its second call, after {AGAIN:g} times the loss,"
            # not AGAIN times the first reference: a model may add a part of its own, such as Megatron's auxiliary loss
            then = reference_of(model, _times_again(loss), shards, dtype, before=reference.union)
            _require_equal(second, then, [calls[1] for calls in everyone], facts, step=2)
    except CheckFailed:
        once_more = reference_of(model, loss, shards, dtype).union
        if all(reference.accepts(name, once_more[name]) for name in once_more):
            raise
        raise Inconclusive(
            f"{who}: the gradient of one process differs from run to run, the model draws random numbers "
            "as dropout does; call .eval() on it in make"
        ) from None


def _require_equal(who: str, reference: Reference, everyone: Sequence[Gradients], facts: str, *, step: int = 1) -> None:
    """Check that every rank holds the gradients of the reference; ``who`` begins the message.

    ``step`` is the number of the call.
    """
    __tracebackhide__ = True
    for rank, found in enumerate(everyone):
        if missing := [name for name in reference.union if name not in found]:
            raise failure(f"{who} rank {rank} has no parameter {missing[0]!r} any more", case=facts)
    wrong = [[name for name in reference.union if not reference.accepts(name, found[name])] for found in everyone]
    if not any(wrong):
        return
    rank, names = next((rank, names) for rank, names in enumerate(wrong) if names)
    found = everyone[rank]
    name = names[0]
    expected = reference.of(name)
    held = or_zero(found[name], expected)
    if held.shape != expected.shape:
        raise failure(
            f"{who} rank {rank} holds a gradient of {name!r} of shape {tuple(held.shape)}, that of one "
            f"process is of shape {tuple(expected.shape)}",
            likely_cause="what is divided over ranks has gradients of its own: see check_sharded_layer",
            case=facts,
        )
    at = first_index(~((held - expected).abs() <= reference.allowed(name)))
    value = "None" if found[name] is None else show(held[at])
    raise failure(
        f"{who} rank {rank} holds {value} at {at} of the gradient of {name!r}, "
        f"one process on all samples holds {show(expected[at])}",
        Place(rank, f"gradient of {name!r}", at, "None" if found[name] is None else held[at], expected[at], step),
        own_shards=", ".join(_own(shard[name], at, r) for r, shard in enumerate(reference.shards)),
        wrong_gradients=wrong_on_ranks(wrong, [len(reference.union)] * len(wrong)),
        best_fit=best_fit([or_zero(found[n], reference.of(n)) for n in names], [reference.of(n) for n in names]),
        likely_cause=Causes(reference).diagnose(everyone, wrong, rank),
        case=facts,
    )


def _times_again(loss: Loss) -> Loss:
    """Return the loss of the second call."""
    return lambda outputs, targets: AGAIN * loss(outputs, targets)


def _synchronised(
    model: nn.Module,
    loss: Loss,
    shards: Sequence[Shard],
    sync: Callable[[nn.Module, int], object],
    again: bool,
    who: str,
    dtype: torch.dtype,
) -> list[Gradients]:
    """Run backward on this rank's shard, then ``sync``, once or twice; return the gradients after each call."""
    torch.manual_seed(dist.get_rank() + 1)
    loss = in_dtype(loss, dtype)
    inputs, targets = shards[dist.get_rank()]
    before = {name: whole(parameter) for name, parameter in model.named_parameters()}
    results: list[Gradients] = []
    for factor in (1.0, AGAIN) if again else (1.0,):
        if results:
            model.zero_grad()
        if len(inputs):
            value = factor * loss(model(inputs), targets)
            _require_one_number(value)
            _require_way_back(who, model, value)
            value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with naming_parameters_without_gradient(model, asks=False) if again else nullcontext():
            sync(model, len(inputs))
        parameters = dict(model.named_parameters())
        results.append({name: None if p.grad is None else whole(p.grad) for name, p in parameters.items()})
        if parameters.keys() != before.keys() or not all(
            torch.equal(whole(p), before[n]) for n, p in parameters.items()
        ):
            break  # sync also took a step, so the next gradient would be that of another model
    return results


def _pairs(shards: Iterable[Any]) -> list[Shard]:
    """Return inputs and targets of each rank, and raise if they are not tensors of samples."""
    if isinstance(shards, Tensor):
        raise TypeError("shards has (inputs, targets) of each rank, got one tensor")
    shards = list(shards)
    if not shards:
        raise ValueError("shards has inputs and targets of each rank, got none")
    for rank, shard in enumerate(shards):
        if not isinstance(shard, tuple | list) or len(shard) != 2:
            raise TypeError(f"shards has (inputs, targets) of each rank, rank {rank} has a {type(shard).__name__}")
        for what, one in zip(("inputs", "targets"), shard, strict=True):
            if not isinstance(one, Tensor):
                raise TypeError(
                    f"shards has tensors whose first dimension is samples, the {what} of rank {rank} are a "
                    f"{type(one).__name__}; give a tensor, and have make return a module that takes it"
                )
            if not one.dim():
                raise ValueError(
                    f"shards has tensors whose first dimension is samples, the {what} of rank {rank} have none"
                )
    return shards


def _require_one_number(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TypeError(f"loss must return one number, a mean or a sum over samples, it returned {given}")


def _require_way_back(who: str, model: nn.Module, value: Tensor) -> None:
    """Check that this rank's loss depends on the model.

    The loss on all samples depends on it, because otherwise there is no reference.
    """
    __tracebackhide__ = True
    if not value.requires_grad and any(parameter.requires_grad for parameter in model.parameters()):
        raise failure(
            f"{who}: no gradient comes back from the loss of rank {dist.get_rank()}: no parameter is in it",
            likely_cause="a collective in the loss or in the model cuts the way back: those of torch.distributed have "
            "none, those of torch.distributed.nn.functional have one",
        )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _own(grad: Tensor | None, at: tuple[int, ...], rank: int) -> str:
    return f"rank {rank}: {'None' if grad is None else show(grad[at])}"
