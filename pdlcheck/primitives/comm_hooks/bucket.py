"""The argument of a communication hook: torch's ``GradBucket``, or any object with the same methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor

__all__ = ["Bucket"]

if TYPE_CHECKING:

    class Bucket(Protocol):
        """A part of a replica's gradients, flat, of one dtype and device."""

        def index(self) -> int:
            """Return the place of the bucket in this backward pass, from 0."""

        def is_last(self) -> bool:
            """Return whether this is the last bucket of the backward pass."""

        def buffer(self) -> Tensor:
            """Return all gradients as one vector. The future of a hook holds such a vector."""

        def set_buffer(self, tensor: Tensor) -> None:
            """Use another vector as the buffer."""

        def gradients(self) -> list[Tensor]:
            """Return views of the buffer, with the shapes of the parameters."""

        def parameters(self) -> list[Tensor]:
            """Return the parameters, in the order of the gradients."""

else:
    Bucket = dist.GradBucket  # DDP compares the annotation of a hook with this type
