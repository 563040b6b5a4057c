"""In-edges laid out for the solver: rows by falling in-degree, cut into slices of sixteen.

The entries of a slice are stored one of each row, then the next one of each, so that sixteen sums go on at a time; rows
are sorted, so a slice holds rows of about equal length. Long rows, which may have no equals, are summed each alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.gathering import LANES
from pdlcheck.primitives.pagerank.graph import NARROW, Float64, Graph
from pdlcheck.primitives.pagerank.kernels import count_degrees, deal_to_blocks, deal_to_rows, rows_by_degree
from pdlcheck.primitives.pagerank.threads import Team, ranges

__all__ = ["Layout", "lay_out", "layout_of"]

LONG = 512  # a row with more entries is summed alone
EDGES_PER_BLOCK = 1 << 17  # a megabyte or so while they are dealt to rows, a tenth of a millisecond in a sweep
LARGE = 1 << 20  # a graph with fewer edges is one block
MOST_BUILDERS = 4  # each has 8 bytes for each node


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows, padded with empty ones to whole slices; a place without an edge has the first empty row for its source.

    Args:
        row: of each node.
        long_rows: how many rows are summed alone, a multiple of LANES.
        begins: where the entries of each long row begin, then those of each slice, and where the last ones end.
        sources: rows, one per place.
        shares: of each place; None where every node shares alike.
        out: 1 / out-degree, or 1 with shares; 0 for a dangling node, 1 for padding.
        share_error: how often a share was rounded.
        bounds: blocks of slices with about equal work; they depend on the graph alone, and so does each rounding.
    """

    row: NDArray[Any]
    long_rows: int
    begins: NDArray[np.int64]
    sources: NDArray[Any]
    shares: Float64 | None
    out: Float64
    share_error: float
    bounds: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return len(self.out)

    @property
    def num_blocks(self) -> int:
        return len(self.bounds) - 1

    @property
    def longest(self) -> int:
        """Additions in the longest sum of a row, in units of LANES lanes."""
        return int(np.diff(self.begins).max()) // LANES

    @cached_property
    def dangling(self) -> NDArray[np.intp]:
        """The rows that send nothing."""
        return np.flatnonzero(self.out == 0)

    def rows_of(self, per_node: Float64) -> Float64:
        """What each node has (one number, or several) as what each row has, 0 for padding."""
        rows = np.zeros((self.num_rows, *per_node.shape[1:]))
        rows[self.row] = per_node
        return rows

    def uniform(self) -> Float64:
        """The same for 1 / (number of nodes) everywhere."""
        rows = np.full(self.num_rows, 1 / len(self.row))
        rows[len(self.row) :] = 0
        return rows

    def nodes_of(self, per_row: Float64) -> Float64:
        """The way back."""
        return np.asarray(per_row[self.row], np.float64)


def layout_of(graph: Graph) -> Layout:
    """The layout of ``graph``, made once: a graph never changes."""
    found: Layout | None = vars(graph).get("_layout")
    if found is None:
        vars(graph)["_layout"] = found = lay_out(graph)
    return found


def lay_out(graph: Graph) -> Layout:
    """The layout of ``graph``, made anew: two passes over its edges, 4 bytes for each, 12 with weights.

    Edges are dealt to blocks first, then to rows within each block, so that writes stay in cache; 2 or 4 bytes per edge
    are needed meanwhile. Where each edge goes does not depend on the number of threads.
    """
    n, weights = graph.num_nodes, graph.weights
    narrow = n < NARROW
    alike = weights is None or (weights.size > 0 and weights.min() == weights.max() > 0)
    with Team(min(MOST_BUILDERS, 1 + graph.num_edges // EDGES_PER_BLOCK)) as team:
        parts = ranges(graph.num_edges, team.size)
        degree_type = np.int32 if graph.num_edges < NARROW else np.int64
        out_degrees, in_degrees = np.zeros((2, team.size, n), degree_type)
        team.run(lambda k: count_degrees(*parts[k], graph.src, graph.dst, out_degrees[k], in_degrees[k]))
        out_degree, in_degree = (degrees.sum(axis=0, dtype=degree_type) for degrees in (out_degrees, in_degrees))
        node, row = (np.empty(n, np.int32 if narrow else np.int64) for _ in range(2))
        rows_by_degree(in_degree, np.zeros(int(in_degree.max(initial=0)) + 2, np.int64), node, row)
        num_rows = (n // LANES + 1) * LANES  # at least one row of padding
        degree = np.zeros(num_rows, np.int64)
        degree[:n] = in_degree[node]
        long_rows = -(-int(np.searchsorted(-degree, -LONG)) // LANES) * LANES
        taken = np.concatenate([-(-degree[:long_rows] // LANES), degree[long_rows::LANES]]) * LANES
        begins = np.concatenate([[0], np.cumsum(taken)])
        bounds = _bounds(taken, long_rows)
        block_of = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
        first_row = bounds[:-1] * LANES
        counts = np.zeros((team.size, len(first_row)), np.int64)
        filled = first_row[first_row < n]  # the last block may be padding alone
        for k in range(team.size):
            counts[k, : len(filled)] = np.add.reduceat(in_degrees[k][node], filled, dtype=np.int64)
        del degree, in_degree, node
        in_block = counts.sum(axis=0)
        next_place = begins[np.where(first_row < long_rows, first_row, long_rows + (first_row - long_rows) // LANES)]
        next_places = next_place + np.cumsum(counts, axis=0) - counts
        edge_shares = None if alike else graph.probabilities
        sources = np.empty(int(begins[-1]), row.dtype)
        shares = None if alike else np.empty(len(sources))
        most_rows = int(np.diff(bounds).max()) * LANES
        rows = np.empty(len(sources), np.uint16 if most_rows <= 1 << 16 else np.int32)
        team.run(
            lambda k: deal_to_blocks(
                *(*parts[k], graph.src, graph.dst, edge_shares, row, block_of, bounds, next_places[k]),
                *(rows, sources, shares),
            )
        )
        counter, most_edges = np.zeros(1, np.int64), int(in_block.max())
        held = np.empty((team.size, most_edges), row.dtype)
        held_shares = [None if alike else np.empty(most_edges) for _ in range(team.size)]
        room = np.empty((team.size, most_rows), np.int64)
        team.run(
            lambda k: deal_to_rows(
                *(counter, bounds, long_rows, begins, in_block, n, rows, sources, shares),
                *(room[k], held[k], held_shares[k]),
            )
        )
    out = np.ones(num_rows)
    if alike:
        out[row] = np.divide(1.0, out_degree, out=np.zeros(n), where=out_degree > 0)
    else:
        out[row] = ~graph.dangling
    share_error = 0.0 if alike else float(out_degree.max())
    return Layout(row, long_rows, begins, sources, shares, out, share_error, bounds)


def _bounds(taken: NDArray[np.int64], long_rows: int) -> NDArray[np.int64]:
    each = np.concatenate([taken[:long_rows].reshape(-1, LANES).sum(1), taken[long_rows:]])
    work = np.cumsum(each + 4 * LANES)
    count = int(work[-1] // EDGES_PER_BLOCK) if work[-1] >= LARGE else 1
    cuts = 1 + np.searchsorted(work, work[-1] * np.arange(1, count) / count)
    return np.unique(np.concatenate([[0], cuts, [len(work)]])).astype(np.int64)
