"""What a hook is handed: torch's ``GradBucket``, or anything with the same methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor

__all__ = ["Bucket"]

if TYPE_CHECKING:

    class Bucket(Protocol):
        """Some of a replica's gradients, flat, of one dtype and device."""

        def index(self) -> int:
            """The place of the bucket in this backward pass, from 0."""

        def is_last(self) -> bool:
            """Does no other bucket follow in this backward pass?"""

        def buffer(self) -> Tensor:
            """All gradients as one vector; a hook's future ends with such a vector."""

        def set_buffer(self, tensor: Tensor) -> None:
            """Use another vector as the buffer."""

        def gradients(self) -> list[Tensor]:
            """Views of the buffer, with the shapes of the parameters."""

        def parameters(self) -> list[Tensor]:
            """The parameters, in the order of the gradients."""

else:
    Bucket = dist.GradBucket  # DDP compares the annotation of a hook with this type
