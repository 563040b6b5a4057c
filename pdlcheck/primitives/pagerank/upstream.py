"""Nodes upstream of all cycles: their scores follow from the teleport vector, without a round.

A node without in-edges has the score ``(1 - d) v + d m w`` of its own; one whose in-edges all come from such nodes has
what they send besides. So a vector that takes in what these nodes send, once, for v and once for w, stands for them and
their edges: the rounds are left with the others. Graphs of dependencies or citations have few edges left then.

Level 1 are the nodes without in-edges, level 2 those whose in-edges all come from level 1, and so on, as long as a
level has enough edges to be worth a pass over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.compiled import compiled
from pdlcheck.primitives.pagerank.graph import NARROW, Float64, Graph
from pdlcheck.primitives.pagerank.kernels import count_degrees
from pdlcheck.primitives.pagerank.threads import Team

__all__ = ["Upstream", "find_upstream", "take_upstream"]

WORTH = 1 / 10  # of the edges, for a level: to find it costs as much as thirty rounds over so few
PART = 64  # terms that are added apart, so that a long sum rounds like two short ones
PARTS = 1 << 12  # of them at a time: two megabytes or less


@dataclass(frozen=True, eq=False)
class Upstream:
    """The last rows of a layout, one of each such node, in order of their levels, and the edges that leave them.

    Args:
        firsts: the first row of each level, and the number of all rows.
        begins: where the edges that come to each row from these rows begin, and where the last ones end.
        sources: rows, counted from the first of these, one per edge.
        shares: of each edge; None where every node shares alike.
        out: as in the layout.
    """

    firsts: NDArray[np.intp]
    begins: NDArray[Any]
    sources: NDArray[Any]
    shares: Float64 | None
    out: Float64

    def taken_in(self, per_row: Float64, damping: float) -> tuple[Float64, Any]:
        """A vector without negative numbers, or several as columns, with what these rows send added.

        Also a bound on the round-off in each, in the L1 norm.
        """
        taken_in = per_row.copy()
        for column in taken_in.reshape(len(taken_in), -1).T:
            self._take_in(column, damping)
        terms = np.diff(self.begins)
        additions = 16 + np.minimum(terms, PART) + terms // PART
        # not a product of BLAS, whose threads go on to spin on cores that the rounds need
        terms_lost = np.einsum("i,i...->...", additions, taken_in)
        return taken_in, terms_lost * np.finfo(np.float64).eps / 2

    def _take_in(self, per_row: Float64, damping: float) -> None:
        """Level by level, as what comes to one of them comes from earlier ones; then the rows of the blocks.

        This is numpy's work, as a compiled loop for it would add a tenth of a second or more to the first call.
        """
        sent = per_row[self.firsts[0] :] * self.out[self.firsts[0] :]
        for first, last in [*pairwise(self.firsts[1:]), (0, self.firsts[0])]:
            terms = np.diff(self.begins[first : last + 1])
            rows = np.flatnonzero(terms)
            if not rows.size:
                continue
            cuts, terms = self.begins[first + rows], terms[rows]
            if terms.max() <= PART:
                sums = self._summed(sent, cuts, self.begins[last])
            else:
                parts = -(-terms // PART)
                first_part = np.cumsum(parts) - parts
                cuts = np.repeat(cuts - first_part * PART, parts) + np.arange(parts.sum()) * PART
                sums = np.add.reduceat(self._summed(sent, cuts, self.begins[last]), first_part)
            per_row[first + rows] += damping * sums
            if first > 0:
                sent[first - self.firsts[0] : last - self.firsts[0]] = per_row[first:last] * self.out[first:last]

    def _summed(self, sent: Float64, cuts: NDArray[Any], end: int) -> Float64:
        """What comes along the edges between each cut and the next, or the end."""
        sums = np.empty(len(cuts))
        for at in range(0, len(cuts), PARTS):
            first = cuts[at]
            edges = slice(first, cuts[at + PARTS] if at + PARTS < len(cuts) else end)
            come = sent[self.sources[edges]]
            if self.shares is not None:
                come *= self.shares[edges]
            sums[at : at + PARTS] = np.add.reduceat(come, cuts[at : at + PARTS] - first)
        return sums


def find_upstream(
    team: Team,
    parts: list[tuple[int, int]],
    graph: Graph,
    counted: NDArray[Any],
    degrees: tuple[NDArray[Any], NDArray[Any]],
    dangling: NDArray[np.bool_],
) -> tuple[list[NDArray[np.intp]], NDArray[Any]]:
    """The nodes of each level, and the in-degree of each node without their edges.

    Args:
        team, parts: who counted which edges.
        graph: all edges.
        counted: out-degrees and in-degrees, as each member of the team counted them; the edges from these nodes are
            taken from both.
        degrees: the sums of those.
        dangling: of each node.
    """
    out_degree, in_degree = degrees
    levels: list[NDArray[np.intp]] = []
    is_known = dangling.copy()
    while True:
        is_next = (in_degree == 0) & ~is_known
        level = np.flatnonzero(is_next)
        if out_degree[level].sum() < max(1.0, WORTH * graph.num_edges):
            return levels, in_degree
        levels.append(level)
        is_known |= is_next
        team.run(lambda k: count_degrees(*parts[k], graph.src, graph.dst, is_next, -1, *counted[:, k]))  # noqa: B023
        in_degree = counted[1].sum(axis=0, dtype=in_degree.dtype)


def take_upstream(
    graph: Graph,
    edge_shares: Float64 | None,
    row: NDArray[Any],
    firsts: NDArray[np.intp],
    counts: NDArray[Any],
    out: Float64,
) -> Upstream:
    """The edges that leave the rows from ``firsts[0]`` on, of which ``counts`` come to each row."""
    begins = np.zeros(len(counts) + 1, np.int32 if graph.num_edges < NARROW else np.int64)
    np.cumsum(counts, out=begins[1:])
    sources = np.empty(int(begins[-1]), row.dtype)
    shares = None if edge_shares is None else np.empty(len(sources))
    _deal(graph.src, graph.dst, edge_shares, row, int(firsts[0]), begins[:-1].copy(), sources, shares)
    return Upstream(firsts, begins, sources, shares, out)


@compiled(error_model="numpy")
def _deal(
    src: Any, dst: Any, edge_shares: Any, row: Any, first: int, next_place: Any, sources: Any, shares: Any
) -> None:
    for e in range(src.size):
        source = row[src[e]] - first
        if source >= 0:
            at = next_place[row[dst[e]]]
            next_place[row[dst[e]]] = at + 1
            sources[at] = source
            if shares is not None:
                shares[at] = edge_shares[e]
