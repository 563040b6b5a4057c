"""The gradients of one process, on the union of all shards and on each shard."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pdlcheck.checks.state import whole
from pdlcheck.checks.tolerances import ABSOLUTE, RELATIVE

__all__ = ["Gradients", "Loss", "Reference", "Shard", "gradients", "or_zero"]

Shard = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor | None]


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


def gradients(model: nn.Module, loss: Loss, shard: Shard) -> Gradients:
    """Return the gradients of one process on one shard; None for every parameter if the shard is empty."""
    one = copy.deepcopy(model)
    one.zero_grad()
    if len(shard[0]):
        loss(one(shard[0]), shard[1]).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return {name: None if p.grad is None else whole(p.grad) for name, p in one.named_parameters()}


def or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient in the dtype of ``like``; zeros if it is None."""
    return torch.zeros_like(like) if grad is None else grad.to(like.dtype)
