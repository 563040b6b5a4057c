"""Sums over all ranks that every rank finds alike in the last bit, on their way while the rank computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import Members, wire_device

__all__ = ["Tally"]


class Tally:
    """A few float64 numbers of each rank. One all_gather; each rank then rounds the exact sums once, so none differs.

    An all_reduce may add in another order on each rank, and a rank that stops one round early leaves the others
    waiting.
    """

    def __init__(self, numbers: Sequence[float], who: Members) -> None:
        self._who = who
        self._own = torch.tensor(numbers, dtype=torch.float64, device=wire_device(who.group))
        self._all = [torch.empty_like(self._own) for _ in who.ranks]
        self._work: dist.Work | None = None

    def give(self, numbers: Sequence[Tensor]) -> None:
        """What this rank adds next."""
        self._own = torch.stack(list(numbers))

    def start(self) -> None:
        if self._who.world_size == 1:
            self._all = [self._own]
        else:
            self._work = dist.all_gather(self._all, self._own, group=self._who.group, async_op=True)

    def finish(self) -> list[float]:
        """The sums over ranks."""
        if self._work is not None:
            self._work.wait()
        return [math.fsum(column) for column in zip(*torch.stack(self._all).tolist(), strict=True)]
