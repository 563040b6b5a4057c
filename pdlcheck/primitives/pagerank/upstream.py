"""Nodes upstream of all cycles: their scores follow from the teleport vector, without a round.

A node without in-edges has the score ``(1 - d) v + d m w``. A node whose in-edges all come from such nodes has, in
addition, the score that they send. So the solver adds the values that these nodes send once, to v and to w. The rounds
then need only the other nodes and their edges. Graphs of dependencies or citations have few edges left then.

Level 1 is the nodes without in-edges. Level 2 is the nodes whose in-edges all come from level 1, and so on. The levels
end when one has too few edges to be worth a pass over all edges.
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

WORTH = 1 / 10  # least share of the edges in a level: the search costs as much as thirty rounds over so few
PART = 64  # terms per partial sum, so that a long sum rounds like two short ones
PARTS = 1 << 12  # partial sums at a time: two megabytes or less


@dataclass(frozen=True, eq=False)
class Upstream:
    """The last rows of a layout, one per upstream node in order of levels, and the edges that leave them.

    Args:
        firsts: the first row of each level, and the number of all rows.
        begins: for each row, the place where its edges from these rows begin; and the place where the last ones end.
        sources: the source row of each edge, counted from the first upstream row.
        shares: the share of each edge; None if every node gives equal shares.
        out: as in the layout.
    """

    firsts: NDArray[np.intp]
    begins: NDArray[Any]
    sources: NDArray[Any]
    shares: Float64 | None
    out: Float64

    def taken_in(self, per_row: Float64, damping: float) -> tuple[Float64, Any]:
        """Return ``per_row`` with the values added that these rows send, and a bound on the round-off in the L1 norm.

        ``per_row`` is a vector without negative numbers, or several as columns; the bound is one number for each.
        """
        taken_in = per_row.copy()
        for column in taken_in.reshape(len(taken_in), -1).T:
            self._take_in(column, damping)
        terms = np.diff(self.begins)
        additions = 16 + np.minimum(terms, PART) + terms // PART
        # not a product of BLAS, because its threads keep spinning on cores that the rounds need
        terms_lost = np.einsum("i,i...->...", additions, taken_in)
        return taken_in, terms_lost * np.finfo(np.float64).eps / 2

    def _take_in(self, per_row: Float64, damping: float) -> None:
        """Add the values that these rows send, first to the rows of each level, then to the rows of the blocks.

        The order of levels matters, because a level receives values from earlier ones. This uses numpy, because a
        compiled loop would add a tenth of a second or more to the first call.
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
        """Return the sums of the values on the edges between each cut and the next one, or ``end``."""
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
    """Return the nodes of each level, and the in-degree of each node without their edges.

    Args:
        team: the threads that counted the edges.
        parts: the range of edges that each thread counted.
        graph: all edges.
        counted: out-degrees and in-degrees, as each thread counted them; the edges that leave the found nodes are
            subtracted from both.
        degrees: the sums of ``counted`` over the threads.
        dangling: one bool per node.
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
    """Return the edges that leave the rows from ``firsts[0]`` on; ``counts[r]`` of them come to row r."""
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
