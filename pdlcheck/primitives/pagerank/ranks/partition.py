"""The partition of nodes over ranks: one range of ids each, with about equal work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pdlcheck.primitives.arguments import Members, wire_device
from pdlcheck.primitives.pagerank.graph import Ids, Int64

__all__ = ["Partition", "balanced_cuts", "owners", "partition_nodes"]

BUCKETS = 1 << 16  # ranges begin at multiples of num_nodes / BUCKETS, so that no rank counts every node
NODE_LOAD = 4  # the cost of the update of a node, in edges


@dataclass(frozen=True)
class Partition:
    """The nodes of each rank, and the number of edges that enter them.

    Args:
        cuts: the rank at place p has the nodes from ``cuts[p]`` to ``cuts[p + 1] - 1``.
        num_in_edges: for each place, the number of edges of all ranks that enter its nodes.
    """

    cuts: Int64
    num_in_edges: Int64

    @property
    def num_nodes(self) -> Int64:
        """Return for each place the number of its nodes."""
        return np.diff(self.cuts)

    def counts(self, ids: Ids) -> Int64:
        """Return for each place how many of ``ids`` are its nodes."""
        width, in_bucket = _in_buckets(ids, int(self.cuts[-1]))
        return _between(in_bucket, -(-self.cuts // width))


def partition_nodes(dst: Ids, num_nodes: int, who: Members) -> Partition:
    """Cut the nodes into one range per rank, by the in-edges that all ranks hold together. One all_reduce.

    Args:
        dst: destinations of the edges that this rank holds.
        num_nodes: the number of nodes, the same on every rank.
        who: the ranks of the group.

    Returns:
        A :class:`Partition`, the same on every rank.
    """
    width, in_bucket = _in_buckets(dst, num_nodes)
    buckets, load = len(in_bucket), torch.from_numpy(in_bucket).to(wire_device(who.group))
    if who.world_size > 1 and buckets:
        dist.all_reduce(load, group=who.group)
    in_edges = load.cpu().numpy()
    nodes = np.full(buckets, width)
    nodes[-1:] -= buckets * width - num_nodes
    cuts = balanced_cuts(in_edges + NODE_LOAD * nodes, who.world_size)
    return Partition(np.minimum(width * cuts, num_nodes), _between(in_edges, cuts))


def _in_buckets(ids: Ids, num_nodes: int) -> tuple[int, Int64]:
    """Return the number of nodes of a bucket, and how many of ``ids`` are in each bucket."""
    width = max(1, -(-num_nodes // BUCKETS))
    return width, np.bincount(ids // width, minlength=-(-num_nodes // width))


def _between(counts: Int64, cuts: Int64) -> Int64:
    """Return the sums of ``counts`` from each cut to the next."""
    return np.diff(np.concatenate([[0], np.cumsum(counts)])[cuts])


def balanced_cuts(load: Int64, parts: int) -> Int64:
    """Cut a row of loads into ``parts`` ranges, each at most ``sum(load) / parts + max(load)``; some may be empty.

    Example:
        >>> balanced_cuts(np.array([1, 1, 1, 1, 4]), 2).tolist()
        [0, 4, 5]
    """
    total = np.concatenate([[0], np.cumsum(load)])
    wanted = total[-1] * np.arange(parts + 1) // parts
    after = np.searchsorted(total, wanted)
    before = np.maximum(after - 1, 0)
    cuts: Int64 = np.where(wanted - total[before] < total[after] - wanted, before, after).astype(np.int64)
    cuts[0], cuts[-1] = 0, len(load)
    return cuts


def owners(ids: Ids, cuts: Int64) -> NDArray[np.int16]:
    """Return for each id the place of the rank that has the node."""
    return np.searchsorted(cuts[1:], ids, side="right").astype(np.int16)
