"""The layout of in-edges for the solver: rows by descending in-degree, cut into slices of sixteen.

A slice stores one entry of each of its rows, then the next entry of each, so that sixteen sums run at the same time.
Rows are sorted, so the rows of a slice have about equal length. Long rows may have no others of equal length, so each
is summed alone. Nodes of equal in-degree that follow each other by id are in consecutive slices.

Sinks are dangling nodes, and they have the last rows. No row reads the score of a single sink, so a round need not
compute it. Every row reads the mass of all sinks together. It follows from ``leaving``, the part that each other node
sends to sinks. If few nodes are sinks, this costs more than their scores, and they are rows like others.

Nodes upstream of all cycles, if they have many edges, have rows after all others, and no slices: no round computes
their scores. See :mod:`~pdlcheck.primitives.pagerank.upstream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.gathering import LANES
from pdlcheck.primitives.pagerank.graph import NARROW, Float64, Graph
from pdlcheck.primitives.pagerank.kernels import count_degrees, deal_rows, deal_to_blocks, deal_to_rows
from pdlcheck.primitives.pagerank.threads import Team, ranges
from pdlcheck.primitives.pagerank.upstream import Upstream, find_upstream, take_upstream

__all__ = ["Layout", "is_laid_out", "lay_out", "layout_of"]

LONG = 512  # a row with more entries is summed alone
EDGES_PER_BLOCK = 1 << 17  # about a megabyte while they are dealt to rows, a tenth of a millisecond in a sweep
LARGE = 1 << 20  # a graph with fewer edges is one block, and its layout takes less time than the start of threads
MOST_BUILDERS = 4  # each takes 8 bytes per node
FEW = 1 / 16  # share of the nodes; fewer sinks are rows like others
COUNTED = 1 << 20  # entries at a time, 8 bytes for each


@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a graph, padded with empty ones to whole slices.

    A place without an edge has the last empty row as its source.

    Args:
        row: the row of each node.
        long_rows: the number of rows that are summed alone, a multiple of LANES.
        begins: the place where the entries of each long row begin, then those of each slice, and where the last ones
            end.
        sources: the source row of each place.
        shares: the share of each place; None if every node gives equal shares.
        out: 1 / out-degree, or 1 with shares; 0 for a dangling node, 1 for padding.
        divisors: 1 / out for each node; 1 for a dangling node. None with shares, where all are 1.
        leaving: the part of its score that each row sends to sinks; None if sinks are not separate.
        share_error: the number of roundings of a share.
        bounds: the limits of the blocks, in slices. Blocks have about equal work. They depend on the graph alone, and
            so does each rounding.
        sink_block: the first block of sinks. Dangling nodes with a long row are not among them.
        num_sinks: the number of separate sinks; 0 if there are few.
        upstream: the rows after those of the blocks; None if they would be few.
    """

    row: NDArray[Any]
    long_rows: int
    begins: NDArray[np.int64]
    sources: NDArray[Any]
    shares: Float64 | None
    out: Float64
    divisors: NDArray[Any] | None
    leaving: Float64 | None
    share_error: float
    bounds: NDArray[np.int64]
    sink_block: int
    num_sinks: int
    upstream: Upstream | None

    @property
    def num_rows(self) -> int:
        """Return the number of rows, padding included."""
        return len(self.out)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.bounds) - 1

    @property
    def first_sink(self) -> int:
        """Return the first row of ``sink_block``."""
        return int(self.bounds[self.sink_block]) * LANES

    @property
    def end_of_blocks(self) -> int:
        """Return the end of the rows in blocks, which is the first upstream row if there are any."""
        return int(self.bounds[-1]) * LANES

    @property
    def longest(self) -> int:
        """Return the number of additions in the longest sum of a row, in units of LANES lanes."""
        return int(np.diff(self.begins).max()) // LANES

    @cached_property
    def dangling(self) -> NDArray[np.intp]:
        """Return the rows that send nothing."""
        return np.flatnonzero(self.out == 0)

    def rows_of(self, per_node: Float64) -> Float64:
        """Return a vector over nodes, or several as columns, as one over rows, with 0 for padding."""
        rows = np.zeros((self.num_rows, *per_node.shape[1:]))
        rows[self.row] = per_node
        return rows

    @cached_property
    def uniform(self) -> Float64:
        """Return the vector over rows that is 1 / (number of nodes) for every node; it is read-only."""
        rows = np.full(self.num_rows, 1 / len(self.row))
        for empty in self.padding:
            rows[empty] = 0
        rows.flags.writeable = False
        return rows

    @property
    def padding(self) -> tuple[slice, slice]:
        """Return the rows that belong to no node: before the sinks, and at the end of the blocks."""
        num_upstream = self.num_rows - self.end_of_blocks
        num_others = len(self.row) - self.num_sinks - num_upstream
        if self.num_sinks == 0:
            return slice(0, 0), slice(num_others, self.end_of_blocks)
        return slice(num_others, self.first_sink), slice(self.first_sink + self.num_sinks, self.end_of_blocks)

    def in_degrees(self, kind: type) -> NDArray[Any]:
        """Return the in-degree of each row in a block, 0 for other rows.

        All rows of a slice get the in-degree of its largest row, which is seldom larger than their own.
        """
        degrees: NDArray[Any] = np.zeros(self.num_rows, kind)
        alone, entries = self.long_rows, np.diff(self.begins)
        degrees[:alone] = entries[:alone]
        degrees[alone : self.end_of_blocks].reshape(-1, LANES)[:] = entries[alone:, None] / LANES
        for empty in self.padding:
            degrees[empty] = 0
        return degrees

    def nodes_of(self, per_row: NDArray[Any], factors: NDArray[Any] | None, team: Team) -> Float64:
        """Return a vector over rows as one over nodes, scaled to sum 1.

        ``factors`` multiply it, one per node. Numbers that rounding has made negative become 0.
        """
        n, columns = len(self.row), per_row.shape[1:]
        nodes = np.empty((n, *columns))

        def take(part: slice) -> Any:
            found = np.take(per_row, self.row[part], axis=0, mode="clip")
            if factors is None:
                nodes[part] = found
            else:
                np.multiply(found, factors[part].reshape(-1, *(1 for _ in columns)), out=nodes[part])
            np.maximum(nodes[part], 0, out=nodes[part])
            return nodes[part].sum(axis=0)

        totals = np.sum(team.map(take, n), axis=0)
        team.map(lambda part: np.divide(nodes[part], totals, out=nodes[part]), n)
        return nodes


def is_laid_out(graph: Graph) -> bool:
    """Return whether :func:`layout_of` finds a layout that is already made."""
    return "_pdlcheck_layout" in vars(graph)


def layout_of(graph: Graph) -> Layout:
    """Return the layout of ``graph``, which is made once, because a graph never changes."""
    found: Layout | None = vars(graph).get("_pdlcheck_layout")
    if found is None:
        vars(graph)["_pdlcheck_layout"] = found = lay_out(graph)
    return found


def lay_out(graph: Graph) -> Layout:
    """Return a new layout of ``graph``: two passes over its edges, 4 bytes per edge, 12 with weights.

    Edges are dealt to blocks first, then to rows within each block, so that writes stay in cache. This takes 2 or 4
    more bytes per edge for the time being. The place of an edge does not depend on the number of threads.
    """
    n, weights = graph.num_nodes, graph.weights
    alike = weights is None or (weights.size > 0 and weights.min() == weights.max() > 0)
    with Team(MOST_BUILDERS if graph.num_edges >= LARGE else 1) as team:
        parts = ranges(graph.num_edges, team.size)
        degree_type = np.int32 if graph.num_edges < NARROW else np.int64
        counted, of_all = np.zeros((2, team.size, n), degree_type), np.zeros(0, np.bool_)
        team.run(lambda k: count_degrees(*parts[k], graph.src, graph.dst, of_all, 1, *counted[:, k]))
        out_degree, all_in_degree = counted.sum(axis=1, dtype=degree_type)
        is_dangling = out_degree == 0 if alike else graph.dangling
        levels, in_degree = find_upstream(team, parts, graph, counted, (out_degree, all_in_degree), is_dangling)
        is_sink = is_dangling & (in_degree <= LONG)
        if (num_sinks := int(np.count_nonzero(is_sink))) < FEW * n:
            is_sink[:], num_sinks = False, 0
        row, first_sink, end, num_rows = _numbered(in_degree, is_sink, levels)
        degree = np.zeros(num_rows, np.int64)
        degree[row] = in_degree
        long_rows = _whole_slices(int(np.count_nonzero(in_degree > LONG)))
        taken = np.concatenate([-(-degree[:long_rows] // LANES), degree[long_rows:end:LANES]]) * LANES
        begins = np.concatenate([[0], np.cumsum(taken)])
        bounds, sink_block = _bounds(taken, long_rows, first_sink // LANES)
        counts = np.empty((team.size, len(bounds) - 1), np.int64)
        for k in range(team.size):
            degree[row] = counted[1, k]
            counts[k] = np.add.reduceat(degree[:end], bounds[:-1] * LANES)
        edge_shares = None if alike else graph.probabilities
        sources, shares = _dealt(team, parts, graph, edge_shares, row, long_rows, begins, bounds, counts, end - 1)
    out = np.ones(num_rows)
    if alike:
        out[row] = np.divide(1.0, out_degree, out=np.zeros(n), where=out_degree > 0)
    else:
        out[row] = ~graph.dangling
    upstream = None
    if levels:
        degree[row] = all_in_degree - in_degree
        firsts = end + np.cumsum([0, *(len(level) for level in levels)])
        upstream = take_upstream(graph, edge_shares, row, firsts, degree, out)
    share_error = 0.0 if alike else float(out_degree.max())
    leaving = out * _sent_to(begins[_unit(first_sink, long_rows)], sources, shares, num_rows) if num_sinks else None
    ends = bounds, sink_block, num_sinks
    divisors = np.maximum(out_degree, 1) if alike else None
    return Layout(row, long_rows, begins, sources, shares, out, divisors, leaving, share_error, *ends, upstream)


def _numbered(
    in_degree: NDArray[Any], is_sink: NDArray[np.bool_], levels: list[NDArray[np.intp]]
) -> tuple[NDArray[Any], int, int, int]:
    """Return the row of each node, the first row of a sink, the first row of ``levels``, and the number of rows.

    Rows are in order of descending in-degree. Sinks are after the other rows, and the nodes of ``levels`` after all of
    them.
    """
    n, num_sinks = len(in_degree), int(np.count_nonzero(is_sink))
    num_upstream = sum(len(level) for level in levels)
    row = np.empty(n, np.int32 if n < NARROW else np.int64)
    in_blocks = n - num_sinks - num_upstream
    first_sink = _whole_slices(in_blocks)
    end = first_sink + _whole_slices(num_sinks + 1)  # at least one row of padding
    first_place = int(in_degree.max(initial=0)) + 1  # the first place of sinks
    place = first_place - 1 - in_degree.astype(np.int64)
    place[is_sink] += LONG + 1
    if levels:
        upstream = np.concatenate(levels)
        row[upstream], place[upstream] = np.arange(end, end + num_upstream), -1
    counts = np.bincount(place + 1, minlength=first_place + LONG + 2)[1:]
    counts[first_place - 1] += first_sink - in_blocks
    ends = np.cumsum(counts)
    begins = ends - counts
    ends[first_place - 1] = in_blocks
    deal_rows(place, begins, _whole_slices(begins), ends // LANES * LANES, row)
    return row, first_sink, end, end + num_upstream


def _dealt(
    team: Team,
    parts: list[tuple[int, int]],
    graph: Graph,
    edge_shares: Float64 | None,
    row: NDArray[Any],
    long_rows: int,
    begins: NDArray[np.int64],
    bounds: NDArray[np.int64],
    counts: NDArray[np.int64],
    empty_row: int,
) -> tuple[NDArray[Any], Float64 | None]:
    """Return ``sources`` and ``shares``; ``counts[k, b]`` edges of ``parts[k]`` go to block b."""
    next_place = begins[_unit(bounds[:-1] * LANES, long_rows)]
    next_places = next_place + np.cumsum(counts, axis=0) - counts
    sources = np.empty(int(begins[-1]), row.dtype)
    shares = None if edge_shares is None else np.empty(len(sources))
    most_rows = int(np.diff(bounds).max()) * LANES
    rows = np.empty(len(sources), np.uint16 if most_rows <= 1 << 16 else np.int32)
    block_of = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    team.run(
        lambda k: deal_to_blocks(
            *(*parts[k], graph.src, graph.dst, edge_shares, row, empty_row, block_of, bounds, next_places[k]),
            *(rows, sources, shares),
        )
    )
    in_block, counter = counts.sum(axis=0), np.zeros(1, np.int64)
    most_edges = int(in_block.max())
    held = np.empty((team.size, most_edges), row.dtype)
    held_shares = [None if edge_shares is None else np.empty(most_edges) for _ in range(team.size)]
    room = np.empty((team.size, most_rows), np.int64)
    team.run(
        lambda k: deal_to_rows(
            *(counter, bounds, long_rows, begins, in_block, empty_row, rows, sources, shares),
            *(room[k], held[k], held_shares[k]),
        )
    )
    return sources, shares


def _sent_to(first_place: int, sources: NDArray[Any], shares: Float64 | None, num_rows: int) -> Float64:
    """Return for each row the number of its edges, or the sum of their shares, from ``first_place`` on."""
    sent = np.zeros(num_rows)
    for at in range(first_place, len(sources), COUNTED):
        places = slice(at, at + COUNTED)
        sent += np.bincount(sources[places], None if shares is None else shares[places], num_rows)
    return sent


def _unit(row: Any, long_rows: int) -> Any:
    """Return the index in ``begins`` of a row that is long, or the first of a slice."""
    return np.where(row < long_rows, row, long_rows + (row - long_rows) // LANES)


def _whole_slices(rows: Any) -> Any:
    return -(-rows // LANES) * LANES


def _bounds(taken: NDArray[np.int64], long_rows: int, first_sink: int) -> tuple[NDArray[np.int64], int]:
    """Return the limits of the blocks, in slices, and the number of blocks before slice ``first_sink``."""
    each = np.concatenate([taken[:long_rows].reshape(-1, LANES).sum(1), taken[long_rows:]]) + 4 * LANES
    large = each.sum() >= LARGE
    ends = [np.zeros(1, np.int64)]
    for first, last in ((0, first_sink), (first_sink, len(each))):
        work = np.cumsum(each[first:last])
        count = max(1, int(work[-1] // EDGES_PER_BLOCK)) if large and last > first else 1
        cuts = first + 1 + np.searchsorted(work, each[first:last].sum() * np.arange(1, count) / count)
        ends.append(np.unique([*cuts, last]))
    blocks = np.unique(np.concatenate(ends))
    return blocks, int(np.searchsorted(blocks, first_sink))
