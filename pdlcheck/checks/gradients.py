"""The gradient of R replicas on their shards is the gradient of one process on the union of the shards.

In float64, on the model that every rank is given, so that only the synchronisation can be wrong.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdlcheck.checks.message import best_fit, case, failure, first_index, name_of, show, takes_world
from pdlcheck.checks.state import made_wide, whole
from pdlcheck.checks.tolerances import ABSOLUTE, RELATIVE, ROUNDED, require_dtype
from pdlcheck.errors import Inconclusive

__all__ = ["check_gradients_equal_single_process"]

Shard = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor | None]


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
    """After ``sync``, every rank must hold the gradient of ``loss`` on all samples together.

    A gradient that is None counts as zero. An element may be off by 1e-9 of the largest element of its gradient on any
    shard or on the union, and by 1e-12 of the largest of all gradients: round-off of sums in another order is 1e-13, a
    wrong weight is 1e-3 and more. In float32 it is 2e-5 and 1e-7.

    Args:
        make: makes the plain model, outside of the ranks; made once, cast to ``dtype`` and copied to every rank. Its
            samples do not see each other, as they do in batch norm, but where ``sync`` or the model itself makes up for
            that. What wraps a model is for :func:`check_data_parallel`.
        loss: ``loss(model(inputs), targets)``, a mean or a sum over samples.
        shards: inputs and targets of each rank, first dimension is samples; uneven and empty ones find most
            faults. A rank without samples has no gradient (None) when it calls ``sync``, which is where it takes part
            with an empty batch if the model communicates, as synchronised batch norm does.
        sync: called as ``sync(model, num_samples)`` on every rank after backward.
        world: where the ranks run.
        dtype: in which all is done; float32 where ``sync`` or the model casts to it.
        seed: of the initial weights.

    Raises:
        AssertionError: names rank, parameter, index and the likely cause: summed for averaged, never
            synchronised, rank 0's shard, unweighted mean of uneven shards.
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
    shards = [(_cast(x, dtype), _cast(y, dtype)) for x, y in shards]
    sizes = [len(x) for x, _ in shards]
    if not sum(sizes):
        raise Inconclusive(f"{name_of(sync)}: no rank has a sample, there is no gradient to compare")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = made_wide(make)
        model = model if dtype is torch.float64 else model.to(dtype)
    everyone: list[Gradients] = world.run(_synchronised, model, loss, shards, sync, world_size=len(shards))
    union = (torch.cat([x for x, _ in shards]), torch.cat([y for _, y in shards]))
    reference = Reference(
        union=_gradients(model, loss, union),
        shards=[_gradients(model, loss, shard) for shard in shards],
        sizes=sizes,
        like={name: parameter.detach() for name, parameter in model.named_parameters()},
        dtype=dtype,
    )
    if not any(grad is not None and grad.any() for grad in reference.union.values()):
        raise Inconclusive(f"{name_of(sync)}: the gradient on all samples is zero, no fault would show")
    facts = case(world, len(shards), samples=sizes, seed=seed)
    for rank, found in enumerate(everyone):
        if missing := [name for name in reference.union if name not in found]:
            raise failure(f"{name_of(sync)}: rank {rank} has no parameter {missing[0]!r} any more", case=facts)
        wrong = [name for name in reference.union if not reference.accepts(name, found[name])]
        if not wrong:
            continue
        again = _gradients(model, loss, union)
        if not all(reference.accepts(name, again[name]) for name in again):
            raise Inconclusive(
                f"{name_of(sync)}: the gradient of one process differs from run to run, the model draws random numbers "
                "as dropout does; call .eval() on it in make"
            )
        name = wrong[0]
        expected = reference.of(name)
        held = _or_zero(found[name], expected)
        if held.shape != expected.shape:
            raise failure(
                f"{name_of(sync)}: rank {rank} holds a gradient of {name!r} of shape {tuple(held.shape)}, that of one "
                f"process is of shape {tuple(expected.shape)}",
                likely_cause="what is divided over ranks has gradients of its own: see check_sharded_layer",
                case=facts,
            )
        at = first_index(~((held - expected).abs() <= reference.allowed(name)))
        value = "None" if found[name] is None else show(held[at])
        raise failure(
            f"{name_of(sync)}: rank {rank} holds {value} at {at} of the gradient of {name!r}, "
            f"one process on all samples holds {show(expected[at])}",
            own_shards=", ".join(_own(shard[name], at, r) for r, shard in enumerate(reference.shards)),
            wrong_gradients=f"{len(wrong)} of {len(reference.union)} on rank {rank}",
            best_fit=best_fit([_or_zero(found[n], reference.of(n)) for n in wrong], [reference.of(n) for n in wrong]),
            likely_cause=reference.cause(found, wrong, rank),
            case=facts,
        )


@dataclass(frozen=True)
class Reference:
    """Gradients of one process: on the union, and on every shard alone. ``like`` are the parameters, of ``dtype``."""

    union: Gradients
    shards: list[Gradients]
    sizes: list[int]
    like: dict[str, Tensor]
    dtype: torch.dtype

    def of(self, name: str) -> Tensor:
        """The gradient on the union; zeros where it is None."""
        return _or_zero(self.union[name], self.like[name])

    @functools.cached_property
    def largest(self) -> dict[str, float]:
        """The largest element of each gradient, on the union or any shard."""
        known = {name: [grads[name] for grads in (self.union, *self.shards)] for name in self.union}
        return {
            name: max((float(g.abs().max()) for g in grads if g is not None and g.numel()), default=0.0)
            for name, grads in known.items()
        }

    def allowed(self, name: str) -> float:
        """How far an element may be off; a gradient of terms that cancel has the round-off of larger ones."""
        return RELATIVE[self.dtype] * self.largest[name] + ABSOLUTE[self.dtype] * max(self.largest.values())

    def accepts(self, name: str, found: Tensor | None) -> bool:
        expected = self.of(name)
        if found is not None and found.shape != expected.shape:
            return False
        return bool(((_or_zero(found, expected) - expected).abs() <= self.allowed(name)).all())

    def cause(self, found: Gradients, wrong: list[str], rank: int) -> str | None:
        """The first candidate that explains all wrong gradients of ``rank``."""
        for text, candidate in self._candidates(rank):
            if all(self._near(found[name], candidate(name), name) for name in wrong):
                return text
        if all(replace(self, dtype=torch.float32).accepts(name, found[name]) for name in wrong):
            return ROUNDED
        return None

    def _near(self, found: Tensor | None, candidate: Tensor, name: str) -> bool:
        held = _or_zero(found, candidate)
        # a candidate may be world_size times larger than any gradient that is allowed for
        return bool(((held - candidate).abs() <= self.allowed(name) * len(self.sizes)).all())

    def _candidates(self, rank: int) -> Iterator[tuple[str, Callable[[str], Tensor]]]:
        world_size, total = len(self.sizes), sum(self.sizes)

        def weighted(*weights: float) -> Callable[[str], Tensor]:
            def mix(name: str) -> Tensor:
                like = self.of(name)
                parts = [w * _or_zero(grads[name], like) for w, grads in zip(weights, self.shards, strict=True)]
                return torch.stack(parts).sum(0)

            return mix

        def one(place: int) -> Callable[[str], Tensor]:
            return weighted(*(float(place == other) for other in range(world_size)))

        def scaled(factor: float) -> Callable[[str], Tensor]:
            return lambda name: self.of(name) * factor

        yield "it is zero, or None: gradients were lost", scaled(0.0)
        yield f"it is world_size = {world_size} times too large: summed, not averaged", scaled(world_size)
        yield (
            f"it is world_size = {world_size} times too small: divided once too often",
            scaled(1 / world_size),
        )
        yield "it is the gradient of this rank's own shard: it was never synchronised", one(rank)
        means, sums = weighted(*(n / total for n in self.sizes)), weighted(*[1.0] * world_size)
        if not any(all(self._near(mix(name), self.of(name), name) for name in self.union) for mix in (means, sums)):
            coupled = (
                "of what the shards give, which one process on all samples does not have: samples see each other, as "
                "in batch norm (call .eval() in make), or in the loss"
            )
            yield f"it is the mean {coupled}", means
            yield f"it is the sum {coupled}", sums
        unweighted = weighted(*[1 / world_size] * world_size)
        yield "it is the plain mean over ranks: shards are uneven, weight them with their samples", unweighted
        busy = [1 / sum(n > 0 for n in self.sizes) if n else 0.0 for n in self.sizes]
        yield (
            "it is the plain mean over ranks that have samples: weight them with their samples",
            weighted(*busy),
        )
        yield (
            "it is the plain sum over ranks: of means, where one mean is right",
            sums,
        )
        yield f"it is {total} times too small: divided by the samples again", scaled(1 / total)
        yield f"it is {total} times too large: not divided by the samples", scaled(total)
        own = self.sizes[rank]
        if own and own * world_size != total:
            of_this_rank = f"the {own} sample(s) of this rank, where all ranks have {total}"
            yield f"it is divided by world_size times {of_this_rank}", scaled(total / (own * world_size))
            yield f"it is divided by {of_this_rank}", scaled(total / own)
        for other in range(world_size):
            yield f"it is the gradient of rank {other}'s shard: copied, not averaged", one(other)
        for other in range(world_size):
            left = [n if place != other else 0 for place, n in enumerate(self.sizes)]
            if sum(left):
                yield f"the shard of rank {other} is missing", weighted(*(n / total for n in left))
                yield f"the shard of rank {other} is left out", weighted(*(n / sum(left) for n in left))


def _synchronised(
    model: nn.Module, loss: Loss, shards: Sequence[Shard], sync: Callable[[nn.Module, int], object]
) -> Gradients:
    """On every rank: backward on its own shard, then ``sync``."""
    torch.manual_seed(dist.get_rank() + 1)
    inputs, targets = shards[dist.get_rank()]
    if len(inputs):
        _backward(model, loss, (inputs, targets))
    sync(model, len(inputs))
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def _gradients(model: nn.Module, loss: Loss, shard: Shard) -> Gradients:
    """Of one process on one shard; None for every parameter where it has no samples."""
    one = copy.deepcopy(model)
    one.zero_grad()
    if len(shard[0]):
        _backward(one, loss, shard)
    return {name: None if p.grad is None else whole(p.grad) for name, p in one.named_parameters()}


def _backward(model: nn.Module, loss: Loss, shard: Shard) -> None:
    loss(model(shard[0]), shard[1]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad.to(like.dtype)


def _own(grad: Tensor | None, at: tuple[int, ...], rank: int) -> str:
    return f"rank {rank}: {'None' if grad is None else show(grad[at])}"
