"""Sums over all ranks that every rank finds alike in the last bit, on their way while the rank computes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import Members

__all__ = ["Tally"]


class Tally:
    """A few float64 numbers of each rank. One all_gather; each rank then rounds the exact sums once, so none differs.

    An all_reduce may add in another order on each rank, and a rank that stops one round early leaves the others
    waiting.
    """

    def __init__(self, who: Members) -> None:
        self._who = who
        self._all: list[Tensor] = []
        self._work: dist.Work | None = None

    def start(self, numbers: Tensor) -> None:
        """Add these of this rank."""
        if self._who.world_size == 1:
            self._all = [numbers]
        else:
            self._all = [torch.empty_like(numbers) for _ in self._who.ranks]
            self._work = dist.all_gather(self._all, numbers, group=self._who.group, async_op=True)

    def finish(self) -> list[float]:
        """The sums over ranks."""
        if self._work is not None:
            self._work.wait()
        return [math.fsum(column) for column in zip(*torch.stack(self._all).tolist(), strict=True)]
