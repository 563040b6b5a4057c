"""Activation recomputation: keep what a forward pass started from, and run it again when its backward pass comes."""

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
    """What a forward pass started from, besides its inputs and the weights.

    Args:
        random: state of the random numbers of the CPU.
        random_cuda: and of the stage's own GPU.
        buffers: copies of the module's buffers: the second pass must neither see nor repeat what the first one did
            to them, such as the running statistics of batch norm.
        loss_buffers: the same of the loss.
        autocast: dtype of ``torch.autocast`` on the stage's device; None if it was off.
        targets: of the last stage.
    """

    random: Tensor
    random_cuda: Tensor | None
    buffers: Values
    loss_buffers: Values
    autocast: torch.dtype | None
    targets: Any = None

    @contextmanager
    def again(self, module: nn.Module, device: torch.device) -> Iterator[Values]:
        """As it was when the pass started; afterwards random numbers go on as if nothing had happened.

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
    """Note what a forward pass of ``module``, and of ``loss`` if it has one, is about to start from.

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
