"""Activation recomputation: keep the starting state of a forward pass, and run it again before its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdlcheck.primitives.pipeline.calling import Values, buffers_of

__all__ = ["Recipe", "start_recipe"]


@dataclass
class Recipe:
    """The starting state of a forward pass, besides its inputs and the weights.

    Args:
        random: state of the CPU's random numbers.
        random_cuda: state of the random numbers of the stage's own GPU.
        buffers: copies of the module's buffers. The second pass must neither read nor repeat the changes of the first
            one, such as the running statistics of batch norm.
        loss_buffers: copies of the loss's buffers.
        autocast: dtype of ``torch.autocast`` on the stage's device; None if it was off.
        targets: the targets, on the last stage.
    """

    random: Tensor
    random_cuda: Tensor | None
    buffers: Values
    loss_buffers: Values
    autocast: torch.dtype | None
    targets: Any = None

    @contextmanager
    def again(self, module: nn.Module, device: torch.device) -> Iterator[Values]:
        """Restore the starting state of the pass; afterwards, random numbers continue as if nothing had happened.

        Yields:
            The buffers to run with.
        """
        random = torch.get_rng_state()
        random_cuda = torch.cuda.get_rng_state(device) if self.random_cuda is not None else None
        torch.set_rng_state(self.random)
        if self.random_cuda is not None:
            torch.cuda.set_rng_state(self.random_cuda, device)
        try:
            with (
                torch.enable_grad(),
                torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None),
            ):
                yield self.buffers
        finally:
            torch.set_rng_state(random)
            if random_cuda is not None:
                torch.cuda.set_rng_state(random_cuda, device)


def start_recipe(module: nn.Module, loss: object, device: torch.device) -> Recipe:
    """Record the starting state of a forward pass of ``module``, and of ``loss`` if it is a module.

    Source: T. Chen et al., "Training deep nets with sublinear memory cost" (2016).
    """
    kind = device.type
    return Recipe(
        random=torch.get_rng_state(),
        random_cuda=torch.cuda.get_rng_state(device) if kind == "cuda" else None,
        buffers=buffers_of(module),
        loss_buffers=buffers_of(loss),
        autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
    )
