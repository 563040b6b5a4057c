"""What a rank needs of the nodes of other ranks: each value once a round, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import Members, wire_device
from pdlcheck.primitives.pagerank.graph import Ids, Int64

__all__ = ["Halo", "distinct", "make_halo"]


@dataclass(frozen=True)
class Halo:
    """One exchange a round, planned once.

    Args:
        group: of the exchange.
        places: int64, among this rank's nodes, of the values that go to each rank, rank after rank.
        sent, taken: how many values go to, and come from, each place of the group.
    """

    group: dist.ProcessGroup
    places: Tensor
    sent: list[int]
    taken: list[int]

    @property
    def num_nodes(self) -> int:
        """How many nodes of other ranks this one reads."""
        return sum(self.taken)

    def start(self, leaving: Tensor, room: Tensor) -> dist.Work | None:
        """Send ``leaving``, the values at those places; what other ranks send goes to ``room``.

        ``room``, of ``num_nodes`` float64, is complete when the result has been waited for. One all_to_all, in which
        ranks that share no edge exchange nothing.
        """
        if len(self.sent) == 1:
            return None
        work: dist.Work = dist.all_to_all_single(room, leaving, self.taken, self.sent, group=self.group, async_op=True)
        return work


def make_halo(sources: list[Int64], taken: list[int], who: Members) -> Halo:
    """The plan of this rank: ``sources[p]`` are the places of its nodes that the rank at p reads, rising.

    No communication: the owner of a source sees the same edges leave that the reader sees come, and both number the
    distinct sources by rising id.
    """
    places = torch.from_numpy(np.concatenate(sources)).to(wire_device(who.group))
    return Halo(who.group, places, [len(one) for one in sources], taken)


def distinct(places: Ids, size: int) -> tuple[Int64, Ids]:
    """The distinct values among ``places``, which are below ``size``, rising; and the number of each place in them.

    Example:
        >>> [found.tolist() for found in distinct(np.array([5, 2, 5]), 6)]
        [[2, 5], [1, 0, 1]]
    """
    seen = np.zeros(size, np.bool_)
    seen[places] = True
    number = np.cumsum(seen, dtype=places.dtype)
    number -= 1
    return np.flatnonzero(seen), number[places]
