"""The values of other ranks' nodes that a rank needs: each is received once a round, and no other value."""

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
    """The one exchange of each round, planned once.

    Args:
        group: the group of the exchange.
        places: int64, the places among this rank's nodes of the values that go to each rank, rank after rank.
        sent, taken: the number of values that go to, and come from, each place of the group.
    """

    group: dist.ProcessGroup
    places: Tensor
    sent: list[int]
    taken: list[int]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of other ranks that this rank reads."""
        return sum(self.taken)

    def start(self, leaving: Tensor, room: Tensor) -> dist.Work | None:
        """Send ``leaving``, the values at ``places``, and receive the values of other ranks in ``room``.

        ``room`` holds ``num_nodes`` float64 and is complete after a wait for the result. This is one all_to_all, in
        which ranks that share no edge exchange nothing. A single rank posts nothing and gets ``None``.
        """
        if len(self.sent) == 1:
            return None
        work: dist.Work = dist.all_to_all_single(room, leaving, self.taken, self.sent, group=self.group, async_op=True)
        return work


def make_halo(sources: list[Int64], taken: list[int], who: Members) -> Halo:
    """Return the plan of this rank; ``sources[p]`` are the places of its nodes that the rank at p reads, ascending.

    This needs no communication. The owner of a source and the reader see the same edges, and both number the distinct
    sources in ascending order of id.
    """
    places = torch.from_numpy(np.concatenate(sources)).to(wire_device(who.group))
    return Halo(who.group, places, [len(one) for one in sources], taken)


def distinct(places: Ids, size: int) -> tuple[Int64, Ids]:
    """Return the distinct values among ``places``, ascending, and the index in them of each place.

    Every place is below ``size``.

    Example:
        >>> [found.tolist() for found in distinct(np.array([5, 2, 5]), 6)]
        [[2, 5], [1, 0, 1]]
    """
    seen = np.zeros(size, np.bool_)
    seen[places] = True
    number = np.cumsum(seen, dtype=places.dtype)
    number -= 1
    return np.flatnonzero(seen), number[places]
