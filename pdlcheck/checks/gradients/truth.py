"""The gradients of one process, on the union of all shards and on each shard, and the results of the usual faults."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pdlcheck.checks.state import whole
from pdlcheck.checks.tolerances import ABSOLUTE, NARROW, RELATIVE, ROUNDED

__all__ = ["Gradients", "Loss", "Reference", "Shard", "gradients", "or_zero"]

Shard = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor | None]

_COUPLED = (
    "samples of one shard see those of others, as in batch norm or a contrastive loss: on ranks they must see the same "
    "ones, through a gather that gradients come back through"
)
_MOST, _SAME = 1000, 1e-4  # the limit of the divisors to try, and the relative tolerance of a factor


@dataclass(frozen=True)
class Reference:
    """The gradients of one process: on the union, and on every shard alone.

    ``like`` holds the parameters, in ``dtype``. ``before`` holds the right gradients of an earlier call of the same
    function.
    """

    union: Gradients
    shards: list[Gradients]
    sizes: list[int]
    like: dict[str, Tensor]
    dtype: torch.dtype
    before: Gradients | None = None

    def times(self, factor: float) -> Reference:
        """Return the reference of a later call, for a multiple of the loss."""

        def multiple(grads: Gradients) -> Gradients:
            return {name: None if grad is None else grad * factor for name, grad in grads.items()}

        shards = [multiple(grads) for grads in self.shards]
        return replace(self, union=multiple(self.union), shards=shards, before=self.union)

    def of(self, name: str) -> Tensor:
        """Return the gradient on the union; zeros if it is None."""
        return or_zero(self.union[name], self.like[name])

    @functools.cached_property
    def largest(self) -> dict[str, float]:
        """Return the largest element of each gradient, on the union or any shard."""
        known = {name: [grads[name] for grads in (self.union, *self.shards)] for name in self.union}
        return {
            name: max((float(g.abs().max()) for g in grads if g is not None and g.numel()), default=0.0)
            for name, grads in known.items()
        }

    def allowed(self, name: str) -> float:
        """Return the largest allowed error of an element.

        The bound covers larger gradients too, because a gradient whose terms cancel has the round-off of its terms.
        """
        return RELATIVE[self.dtype] * self.largest[name] + ABSOLUTE[self.dtype] * max(self.largest.values())

    def accepts(self, name: str, found: Tensor | None) -> bool:
        """Return whether a gradient has the right shape and is within the tolerance; None counts as zero."""
        expected = self.of(name)
        if found is not None and found.shape != expected.shape:
            return False
        return bool(((or_zero(found, expected) - expected).abs() <= self.allowed(name)).all())

    def cause(self, everyone: Sequence[Gradients], wrong: list[str], rank: int) -> str | None:
        """Return the first candidate that explains all wrong gradients of ``rank``.

        ``everyone`` holds the gradients of each rank; ``wrong`` lists the names of the wrong ones.
        """
        found = everyone[rank]
        alike = len(everyone) > 1 and all(_same(held[name], found[name]) for held in everyone for name in wrong)
        for text, candidate in self._candidates(rank, alike=alike):
            if all(self._near(found[name], candidate(name), name) for name in wrong):
                return text
        if all(replace(self, dtype=torch.float32).accepts(name, found[name]) for name in wrong):
            return ROUNDED
        if self._sees_others():
            return _COUPLED
        return self._another_divisor(found, wrong) or self._rounded(found, wrong)

    def _another_divisor(self, found: Gradients, wrong: list[str]) -> str | None:
        """Return a cause if the gradients are the sum over ranks, divided by a wrong whole number."""
        expected = torch.cat([self.of(name).flatten() for name in wrong])
        held = torch.cat([or_zero(found[name], self.of(name)).flatten() for name in wrong])
        if held.is_complex() or not expected.any():
            return None
        world_size, times = len(self.sizes), float(held.dot(expected) / expected.dot(expected))
        divisor = round(world_size / times) if times > 0 else 0
        if not 1 < divisor < _MOST or abs(times * divisor / world_size - 1) > _SAME:
            return None
        if not all(self._near(found[name], self.of(name) * world_size / divisor, name) for name in wrong):
            return None
        return (
            f"it is {times:.6g} times what is right: as a sum over world_size = {world_size} ranks divided by {divisor}"
        )

    def _rounded(self, found: Gradients, wrong: list[str]) -> str | None:
        """Return a cause if the rounding of a narrow dtype explains the errors; one factor of all elements must not."""
        expected = torch.cat([self.of(name).flatten() for name in wrong])
        off = torch.cat([or_zero(found[name], self.of(name)).flatten() for name in wrong]) - expected
        if off.is_complex() or not expected.any():
            return None
        along = off.dot(expected) / expected.dot(expected)
        if (off - along * expected).norm() <= 0.1 * off.norm():
            return None
        largest = torch.cat([torch.full((self.of(n).numel(),), self.largest[n], dtype=self.dtype) for n in wrong])
        for narrow, relative in NARROW.items():
            if bool((off.abs() <= relative * largest).all()):
                return (
                    f"it differs by no more than {str(narrow).removeprefix('torch.')} rounds: something computes or "
                    "sends in it, as a hook that compresses does, which check_comm_hook(relative=) is for"
                )
        return None

    def _mix(self, weights: Sequence[float]) -> Callable[[str], Tensor]:
        """Return the weighted sum of the shards' gradients, as a function of the name."""

        def mix(name: str) -> Tensor:
            like = self.of(name)
            parts = [w * or_zero(grads[name], like) for w, grads in zip(weights, self.shards, strict=True)]
            return torch.stack(parts).sum(0)

        return mix

    def _largest_of_shards(self, name: str) -> Tensor:
        """Return the maximum over shards, element by element; for complex gradients, which have no order, the sum."""
        parts = torch.stack([or_zero(grads[name], self.of(name)) for grads in self.shards])
        return parts.sum(0) if parts.is_complex() else parts.amax(0)

    def _means(self) -> Callable[[str], Tensor]:
        return self._mix([n / sum(self.sizes) for n in self.sizes])

    def _sums(self) -> Callable[[str], Tensor]:
        return self._mix([1.0] * len(self.sizes))

    def _sees_others(self) -> bool:
        """Return whether a sample's gradient depends on other shards, as in batch norm or a contrastive loss."""
        alike = (all(self._near(mix(n), self.of(n), n) for n in self.union) for mix in (self._means(), self._sums()))
        return not any(alike)

    def _near(self, found: Tensor | None, candidate: Tensor, name: str) -> bool:
        held = or_zero(found, candidate)
        # A candidate may be world_size times larger than the gradients from which the tolerance is computed.
        return bool(((held - candidate).abs() <= self.allowed(name) * len(self.sizes)).all())

    def _candidates(self, rank: int, *, alike: bool) -> Iterator[tuple[str, Callable[[str], Tensor]]]:
        """Yield the possible causes, each with the gradients that it predicts.

        ``alike``: all ranks hold the same gradients, so they are not each rank's own.
        """
        world_size, total = len(self.sizes), sum(self.sizes)

        def one(place: int) -> Callable[[str], Tensor]:
            return self._mix([float(place == other) for other in range(world_size)])

        def scaled(factor: float) -> Callable[[str], Tensor]:
            return lambda name: self.of(name) * factor

        def with_earlier(factor: float) -> Callable[[str], Tensor]:
            def mix(name: str) -> Tensor:
                return or_zero((self.before or {}).get(name), self.of(name)) + factor * self.of(name)

            return mix

        def halfway(name: str) -> Tensor:
            return with_earlier(1.0)(name) / 2

        yield "it is zero, or None: gradients were lost", scaled(0.0)
        if self.before is not None:
            yield "it is what the call before gave: what it kept was not filled anew", with_earlier(0.0)
            yield (
                "what the call before gave was added: what it kept, such as a buffer, was not zeroed",
                with_earlier(1.0),
            )
            yield "it is the mean of what this call and the one before had to give", halfway
        yield f"it is world_size = {world_size} times too large: summed, not averaged", scaled(world_size)
        sees_others, cut = self._sees_others(), ""
        if sees_others:
            cut = ", or a gather in the loss cuts the way back to the outputs of other ranks"
        yield f"it is world_size = {world_size} times too small: divided once too often{cut}", scaled(1 / world_size)
        if not alike:
            yield "it is the gradient of this rank's own shard: it was never synchronised", one(rank)
        means, sums = self._means(), self._sums()
        if sees_others:
            coupled = (
                "of what the shards give, which one process on all samples does not have: samples see each other, as "
                "in batch norm (call .eval() in make), or in the loss"
            )
            yield f"it is the mean {coupled}", means
            yield f"it is the sum {coupled}", sums
        unweighted = self._mix([1 / world_size] * world_size)
        yield "it is the plain mean over ranks: shards are uneven, weight them with their samples", unweighted
        busy = [1 / sum(n > 0 for n in self.sizes) if n else 0.0 for n in self.sizes]
        yield (
            "it is the plain mean over ranks that have samples: weight them with their samples",
            self._mix(busy),
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
        yield "each element is the largest over ranks: reduced by MAX, not averaged", self._largest_of_shards
        for part in _parts_of(rank, world_size):
            only = f"only the shards of ranks {', '.join(map(str, part))} are in it"
            samples = sum(self.sizes[r] for r in part)
            for what, weights in (
                ("mean", [n / samples if samples and r in part else 0.0 for r, n in enumerate(self.sizes)]),
                ("sum", [float(r in part) for r in range(world_size)]),
                ("sum divided by world_size", [float(r in part) / world_size for r in range(world_size)]),
            ):
                yield f"{only}, as a {what}: it was synchronised in a sub-group", self._mix(weights)
        for other in range(world_size):
            left = [n if place != other else 0 for place, n in enumerate(self.sizes)]
            if sum(left):
                yield f"the shard of rank {other} is missing", self._mix([n / total for n in left])
                yield f"the shard of rank {other} is left out", self._mix([n / sum(left) for n in left])


def _parts_of(rank: int, world_size: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups that a rank may be in: neighbours, and every n-th rank.

    Groups of one rank, of all ranks except one, and of all ranks are left out.
    """
    found = {tuple(range(first, last)) for first in range(rank + 1) for last in range(rank + 1, world_size + 1)}
    found |= {tuple(range(rank % n, world_size, n)) for n in range(2, world_size)}
    yield from sorted(one for one in found if 1 < len(one) < world_size - 1)


def gradients(model: nn.Module, loss: Loss, shard: Shard) -> Gradients:
    """Return the gradients of one process on one shard; None for every parameter if the shard is empty."""
    one = copy.deepcopy(model)
    one.zero_grad()
    if len(shard[0]):
        loss(one(shard[0]), shard[1]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return {name: None if p.grad is None else whole(p.grad) for name, p in one.named_parameters()}


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient in the dtype of ``like``; zeros if it is None."""
    return torch.zeros_like(like) if grad is None else grad.to(like.dtype)
