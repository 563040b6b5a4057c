"""Nodes upstream of all cycles: their scores follow from the teleport vector, without a round.

A node without in-edges has the score ``(1 - d) v + d m w`` of its own; one whose in-edges all come from such nodes has
what they send besides. So a vector that takes in what these nodes send, once, for v and once for w, stands for them and
their edges: the rounds are left with the others. Graphs of dependencies or citations have few edges left then.

Level 1 are the nodes without in-edges, level 2 those whose in-edges all come from level 1, and so on, as long as a
level has enough edges to be worth a pass over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.graph import NARROW, Float64, Graph
from pdlcheck.primitives.pagerank.threads import Team

__all__ = ["Upstream", "find_upstream", "take_upstream"]

WORTH = 1 / 10  # of the edges, for a level: to find it costs as much as thirty rounds over so few
PART = 64  # terms that are added apart, so that a long sum rounds like two short ones


@dataclass(frozen=True, eq=False)
class Upstream:
    """The last rows of a layout, one of each such node, in order of their levels, and the edges that leave them.

    Args:
        first: of these rows.
        begins: where the edges that come to each row from these rows begin, and where the last ones end.
        sources: rows, one per edge.
        shares: of each edge; None where every node shares alike.
        out: as in the layout.
    """

    first: int
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
            values = np.ascontiguousarray(column)
            args = self.begins, self.sources, self.shares, self.out, damping, values
            _take_in(self.first, len(values), *args)  # in order of levels: what they get comes from earlier ones
            _take_in(0, self.first, *args)
            column[:] = values
        terms = np.diff(self.begins)
        additions = 16 + np.minimum(terms, PART) + terms // PART
        return taken_in, additions @ taken_in * np.finfo(np.float64).eps / 2


def find_upstream(
    team: Team,
    parts: list[tuple[int, int]],
    graph: Graph,
    degrees: tuple[NDArray[Any], NDArray[Any]],
    dangling: NDArray[np.bool_],
    in_degrees: NDArray[Any],
) -> tuple[list[NDArray[np.intp]], NDArray[Any]]:
    """The nodes of each level, and the in-degree of each node without their edges.

    Args:
        team, parts: who counted which edges.
        graph: all edges.
        degrees: out and in.
        dangling: of each node.
        in_degrees: as each member of the team counted them; edges from these nodes are taken from it.
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
        team.run(lambda k: _take_away(*parts[k], graph.src, graph.dst, is_next, in_degrees[k]))  # noqa: B023
        in_degree = in_degrees.sum(axis=0, dtype=in_degree.dtype)


def take_upstream(
    graph: Graph, edge_shares: Float64 | None, row: NDArray[Any], first: int, counts: NDArray[Any], out: Float64
) -> Upstream:
    """The edges that leave the rows from ``first`` on, of which ``counts`` come to each row."""
    begins = np.zeros(len(counts) + 1, np.int32 if graph.num_edges < NARROW else np.int64)
    np.cumsum(counts, out=begins[1:])
    sources = np.empty(int(begins[-1]), row.dtype)
    shares = None if edge_shares is None else np.empty(len(sources))
    _deal(graph.src, graph.dst, edge_shares, row, first, begins[:-1].copy(), sources, shares)
    return Upstream(first, begins, sources, shares, out)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _take_away(first: int, last: int, src: Any, dst: Any, is_gone: Any, in_degree: Any) -> None:
    for e in range(first, last):
        if is_gone[src[e]]:
            in_degree[dst[e]] -= 1


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _deal(
    src: Any, dst: Any, edge_shares: Any, row: Any, first: int, next_place: Any, sources: Any, shares: Any
) -> None:
    for e in range(src.size):
        source = row[src[e]]
        if source >= first:
            at = next_place[row[dst[e]]]
            next_place[row[dst[e]]] = at + 1
            sources[at] = source
            if shares is not None:
                shares[at] = edge_shares[e]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _take_in(
    first: int, last: int, begins: Any, sources: Any, shares: Any, out: Any, damping: float, values: Any
) -> None:
    for row in range(first, last):
        total = 0.0
        for part in range(begins[row], begins[row + 1], PART):
            few = 0.0
            for at in range(part, min(part + PART, begins[row + 1])):
                sent = values[sources[at]] * out[sources[at]]
                few += sent if shares is None else sent * shares[at]
            total += few
        values[row] += damping * total
