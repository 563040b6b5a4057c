"""In-edges laid out for the solver: rows by falling in-degree, cut into slices of sixteen.

The entries of a slice are stored one of each row, then the next one of each, so that sixteen sums go on at a time; rows
are sorted, so a slice holds rows of about equal length. Long rows, which may have no equals, are summed each alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.gathering import LANES
from pdlcheck.primitives.pagerank.graph import Float64, Graph
from pdlcheck.primitives.pagerank.kernels import count_degrees, fill_slices, rows_by_degree

__all__ = ["Layout", "lay_out", "layout_of"]

LONG = 512  # a row with more entries is summed alone
EDGES_PER_BLOCK = 1 << 19  # a sweep over this many takes about half a millisecond, 10 times what a thread costs
MAX_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows, padded with empty ones to whole slices; a place without an edge has the first empty row for its source.

    Args:
        node: of each row that is not padding.
        long_rows: how many rows are summed alone, a multiple of LANES.
        begins, steps: where a row's entries begin, and how many times LANES of them a sum takes.
        sources: rows, one per place.
        shares: of each place; None where every node shares alike.
        out: 1 / out-degree, or 1 with shares; 0 for a dangling node, 1 for padding.
        share_error: how often a share was rounded.
        blocks: ranges of slices with about equal work; they depend on the graph alone, and so does each rounding.
    """

    node: NDArray[Any]
    long_rows: int
    begins: NDArray[np.int64]
    steps: NDArray[np.int32]
    sources: NDArray[Any]
    shares: Float64 | None
    out: Float64
    share_error: float
    blocks: list[tuple[int, int]]

    @property
    def num_rows(self) -> int:
        """Padding included."""
        return len(self.out)

    def rows_of(self, per_node: Float64) -> Float64:
        """One number per node as one per row, 0 for padding."""
        rows = np.zeros(self.num_rows)
        rows[: len(self.node)] = per_node[self.node]
        return rows

    def nodes_of(self, per_row: Float64) -> Float64:
        """The way back."""
        found = np.empty(len(self.node))
        found[self.node] = per_row[: len(self.node)]
        return found


def layout_of(graph: Graph) -> Layout:
    """The layout of ``graph``, made once: a graph never changes."""
    found: Layout | None = vars(graph).get("_layout")
    if found is None:
        vars(graph)["_layout"] = found = lay_out(graph)
    return found


def lay_out(graph: Graph) -> Layout:
    """The layout of ``graph``, made anew: two passes over its edges, 4 bytes for each, 12 with weights."""
    n, weights = graph.num_nodes, graph.weights
    ids = np.int32 if n < np.iinfo(np.int32).max else np.int64
    out_degree, in_degree = np.zeros(n, np.int64), np.zeros(n, np.int64)
    count_degrees(graph.src, graph.dst, out_degree, in_degree)
    node, row = np.empty(n, ids), np.empty(n, ids)
    rows_by_degree(in_degree, node, row)
    num_rows = (n // LANES + 1) * LANES  # at least one row of padding
    degree = np.zeros(num_rows, np.int64)
    degree[:n] = in_degree[node]
    long_rows = -(-int(np.searchsorted(-degree, -LONG)) // LANES) * LANES
    steps = np.concatenate([-(-degree[:long_rows] // LANES), np.repeat(degree[long_rows::LANES], LANES)])
    taken = np.concatenate([steps[:long_rows], steps[long_rows::LANES]]) * LANES
    before = np.cumsum(taken) - taken
    begins = np.concatenate([before[:long_rows], np.repeat(before[long_rows:], LANES)])
    next_place = begins.copy()
    next_place[long_rows:] += np.tile(np.arange(LANES), (num_rows - long_rows) // LANES)
    alike = weights is None or (weights.size > 0 and weights.min() == weights.max() > 0)
    sources = np.empty(int(taken.sum()), ids)
    edge_order = np.empty(0 if alike else len(sources), np.int64)
    fill_slices(graph.src, graph.dst, row, long_rows, steps, next_place, sources, edge_order)
    out, shares, share_error = np.ones(num_rows), None, 0.0
    if alike:
        out[:n] = np.divide(1.0, out_degree, out=np.zeros(n), where=out_degree > 0)[node]
    else:
        out[:n] = ~graph.dangling[node]
        shares = np.where(edge_order < 0, 0.0, graph.probabilities[edge_order])
        share_error = float(out_degree.max())
    return Layout(
        *(node, long_rows, begins, steps.astype(np.int32), sources, shares, out, share_error),
        blocks=_blocks(steps, long_rows),
    )


def _blocks(steps: NDArray[np.int64], long_rows: int) -> list[tuple[int, int]]:
    each = np.where(np.arange(len(steps)) < long_rows, steps * LANES, steps).reshape(-1, LANES).sum(1)
    work = np.cumsum(each + 4 * LANES)
    count = int(min(MAX_BLOCKS, max(1, work[-1] // EDGES_PER_BLOCK)))
    cuts = 1 + np.searchsorted(work, work[-1] * np.arange(1, count) / count)
    edges = np.unique(np.concatenate([[0], cuts, [len(work)]]))
    return [(int(first), int(last)) for first, last in pairwise(edges)]
