"""The part of a graph that one rank works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pdlcheck.primitives.arguments import Members, wire_device
from pdlcheck.primitives.pagerank.graph import Float64, Ids, Int64
from pdlcheck.primitives.pagerank.ranks.halo import Halo, distinct, make_halo
from pdlcheck.primitives.pagerank.ranks.moving import send_to
from pdlcheck.primitives.pagerank.ranks.partition import Partition, owners
from pdlcheck.primitives.pagerank.ranks.rows import Rows

__all__ = ["Part", "make_part"]

Columns = list[NDArray[Any]]  # two ids for each edge, and its weight if edges have weights


@dataclass(frozen=True)
class Part:
    """The nodes of this rank, and all edges that enter them.

    Args:
        who: the ranks of the group, and which of them this is.
        cuts: the rank at place p has the nodes from ``cuts[p]`` to ``cuts[p + 1] - 1``.
        local, remote: rows of the edges from this rank's own nodes, and from the nodes of its halo.
        halo: the values that it reads from other ranks.
        out: 1 / out-weight for each node of this rank, 0 for a dangling node.
        dangling: int64, the places of this rank's dangling nodes.
        in_degree: float64, the in-degree of each of this rank's nodes.
        out_terms: the number of weights in the longest sum for an ``out`` of any rank; 0 if sums are exact.
    """

    who: Members
    cuts: Int64
    local: Rows
    remote: Rows
    halo: Halo
    out: Tensor
    dangling: Tensor
    in_degree: Tensor
    out_terms: int

    @property
    def nodes(self) -> range:
        """Return the ids of this rank's nodes."""
        return range(int(self.cuts[self.who.rank]), int(self.cuts[self.who.rank + 1]))

    @property
    def num_edges(self) -> int:
        """Return the number of edges that enter this rank's nodes."""
        return int(self.local.degree.sum() + self.remote.degree.sum())

    def sending(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value that each node sends along an edge, and the values that other ranks need."""
        values = scores * self.out
        return values, values[self.halo.places]

    def add_local(self, values: Tensor) -> Tensor:
        """Return the sum, at each of this rank's nodes, of the values that its own nodes send."""
        sums = torch.zeros_like(values)
        self.local.add(values, sums)
        return sums

    def add_remote(self, values: Tensor, sums: Tensor) -> None:
        """Add the values that the nodes of the halo send to ``sums``."""
        self.remote.add(values, sums)

    def update(
        self, arrived: Tensor, scores: Tensor, teleport: Tensor, landing: Tensor, damping: float, mass: float
    ) -> Tensor:
        """Change ``arrived``, in place, into the scores that follow ``scores``.

        Returns:
            Three sums over this rank's nodes: the L1 step, the new dangling mass, and ``sum(in-edges * score)``.
        """
        arrived.mul_(damping).add_(teleport, alpha=1 - damping).add_(landing, alpha=damping * mass)
        return torch.stack([(arrived - scores).abs().sum(), self.mass(arrived), self.in_degree @ arrived])

    def mass(self, scores: Tensor) -> Tensor:
        """Return the mass that this rank's dangling nodes hold."""
        return scores[self.dangling].sum()


def make_part(src: Ids, dst: Ids, weights: Float64 | None, partition: Partition, who: Members) -> Part:
    """Bring all edges to the ranks that need them, and return the part of this rank.

    An edge goes first to the rank of its source. That rank has all out-edges of the node and divides by their weight.
    Then the edge goes to the rank of its destination. No rank holds more than its own edges, and those of its nodes.

    Args:
        src: sources of the edges that this rank holds; ids have one dtype on every rank.
        dst: destinations of these edges.
        weights: their weights; None on every rank or on none.
        partition: the partition of their nodes, the same on every rank.
        who: the ranks of the group.
    """
    cuts, size, device = partition.cuts, partition.num_nodes, wire_device(who.group)
    first, num_rows = int(cuts[who.rank]), int(size[who.rank])
    columns: Columns = [src, dst] if weights is None else [src, dst, weights]
    src, dst, *rest = map(np.concatenate, zip(*send_to(owners(src, cuts), columns, who), strict=True))
    source = src - first
    if rest:
        scaled = _scaled(source, rest[0], num_rows)
        kept = scaled > 0
        source, dst, rest = source[kept], dst[kept], [scaled[kept]]
    total = np.bincount(source, rest[0] if rest else None, num_rows)
    out = np.divide(1.0, total, out=np.zeros(num_rows), where=total > 0)
    exact = not rest or bool((rest[0] == 1).all())
    out_terms = 0 if exact else int(np.bincount(source).max())

    reader = owners(dst, cuts)
    read = np.split(source[np.argsort(reader, kind="stable")], np.searchsorted(np.sort(reader), range(1, len(size))))
    read[who.rank] = source[:0]
    leaving = [distinct(places, num_rows)[0] for places in read]
    pieces = send_to(reader, [source, dst, *rest], who)
    del src, dst, source, rest, reader, read  # each is as large as the received edges
    here: list[Columns] = []
    there: list[Columns] = []
    taken: list[int] = []
    for place, (sender, receiver, *shares) in enumerate(pieces):
        if place == who.rank:
            here.append([receiver - first, sender, *shares])
            taken.append(0)
        else:
            known, column = distinct(sender, int(size[place]))
            there.append([receiver - first, sum(taken) + column, *shares])
            taken.append(len(known))
    del pieces
    local, remote = _rows(here, num_rows, num_rows, device), _rows(there, num_rows, sum(taken), device)
    return Part(
        *(who, cuts, local, remote, make_halo(leaving, taken, who)),
        out=torch.from_numpy(out).to(device),
        dangling=torch.from_numpy(np.flatnonzero(out == 0)).to(device),
        in_degree=torch.from_numpy(local.degree + remote.degree).to(device, torch.float64),
        out_terms=_largest(out_terms, who),
    )


def _rows(pieces: list[Columns], num_rows: int, num_columns: int, device: torch.device) -> Rows:
    nobody = np.empty(0, np.int32)
    row, column, *weights = map(np.concatenate, zip(*pieces, strict=True)) if pieces else (nobody, nobody)
    return Rows(row, column, weights[0] if weights else None, num_rows, num_columns, device)


def _scaled(source: Ids, weights: Float64, num_rows: int) -> Float64:
    """Return the weights, each divided by the largest of its source, so that no sum overflows."""
    largest = np.zeros(num_rows)
    np.maximum.at(largest, source, weights)
    return np.divide(weights, largest[source], out=np.zeros(len(weights)), where=weights > 0)


def _largest(value: int, who: Members) -> int:
    found = torch.tensor([value], device=wire_device(who.group))
    if who.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=who.group)
    return int(found)
