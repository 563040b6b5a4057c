"""Sums over all ranks that are equal in every bit on every rank, gathered while the rank computes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import Members

__all__ = ["Tally"]


class Tally:
    """The exact sums over ranks of a few float64 numbers, by one all_gather.

    Each rank rounds the exact sums once, so all ranks get the same bits. An all_reduce may add in another order on each
    rank, and a rank that stops one round early leaves the others waiting.
    """

    def __init__(self, who: Members) -> None:
        self._who = who
        self._all: list[Tensor] = []
        self._work: dist.Work | None = None

    def start(self, numbers: Tensor) -> None:
        """Post the all_gather of this rank's numbers."""
        if self._who.world_size == 1:
            self._all = [numbers]
        else:
            self._all = [torch.empty_like(numbers) for _ in self._who.ranks]
            self._work = dist.all_gather(self._all, numbers, group=self._who.group, async_op=True)

    def finish(self) -> list[float]:
        """Wait for the numbers of all ranks and return their sums."""
        if self._work is not None:
            self._work.wait()
        return [math.fsum(column) for column in zip(*torch.stack(self._all).tolist(), strict=True)]
