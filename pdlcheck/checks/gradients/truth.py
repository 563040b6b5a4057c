"""The gradients of one process, on the union of all shards and on each shard."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdlcheck.checks.state import whole
from pdlcheck.checks.tolerances import ABSOLUTE, RELATIVE

__all__ = ["Gradients", "Loss", "Reference", "Shard", "gradients", "or_zero", "reference_of"]

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


def reference_of(
    model: nn.Module, loss: Loss, shards: Sequence[Shard], dtype: torch.dtype, before: Gradients | None = None
) -> Reference:
    """Return the gradients of one process on all samples, and on every shard.

    ``before``: the right gradients of an earlier call.
    """
    union = (torch.cat([x for x, _ in shards]), torch.cat([y for _, y in shards]))
    return Reference(
        union=gradients(model, loss, union),
        shards=[gradients(model, loss, shard) for shard in shards],
        sizes=[len(x) for x, _ in shards],
        like={name: parameter.detach() for name, parameter in model.named_parameters()},
        dtype=dtype,
        before=before,
    )


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
