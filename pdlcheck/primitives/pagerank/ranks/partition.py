"""Which rank has which nodes: one range of ids each, with about equal work."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pdlcheck.primitives.arguments import Members, wire_device
from pdlcheck.primitives.pagerank.graph import Int64

__all__ = ["balanced_cuts", "owners", "partition_nodes"]

BUCKETS = 1 << 16  # ranges begin at multiples of num_nodes / BUCKETS, so that no rank counts every node
NODE_LOAD = 4  # what the update of a node costs, in edges


def partition_nodes(dst: Int64, num_nodes: int, who: Members) -> Int64:
    """Cut the nodes into a range for each rank by the in-edges that all ranks hold together. One all_reduce.

    Args:
        dst: destinations of the edges that this rank holds.
        num_nodes: the same on every rank.

    Returns:
        ``world_size + 1`` ids: the place p has the nodes from ``cuts[p]`` to ``cuts[p + 1] - 1``. The same on every
        rank.
    """
    width = max(1, -(-num_nodes // BUCKETS))
    buckets = -(-num_nodes // width)
    load = torch.from_numpy(np.bincount(dst // width, minlength=buckets)).to(wire_device(who.group))
    if who.world_size > 1 and buckets:
        dist.all_reduce(load, group=who.group)
    nodes = np.full(buckets, width)
    nodes[-1:] -= buckets * width - num_nodes
    return np.minimum(width * balanced_cuts(load.cpu().numpy() + NODE_LOAD * nodes, who.world_size), num_nodes)


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


def owners(ids: Int64, cuts: Int64) -> NDArray[np.int16]:
    """The place of the rank that has each node."""
    return np.searchsorted(cuts[1:], ids, side="right").astype(np.int16)
