"""The compiled loops of the fast solver. They release the GIL, so that Python threads can share one sweep."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pdlcheck.primitives.pagerank.gathering import LANES, add_gathered, add_gathered_shares

__all__ = ["TILE", "count_degrees", "fill_slices", "rows_by_degree", "sweep"]

TILE = 64  # slices whose sums are added apart, so that a long sum rounds like two short ones


@numba.njit(cache=True, nogil=True)
def count_degrees(src: Any, dst: Any, out_degree: Any, in_degree: Any) -> None:
    """Add each edge to the counts of its ends."""
    for e in range(src.size):
        out_degree[src[e]] += 1
        in_degree[dst[e]] += 1


@numba.njit(cache=True, nogil=True)
def rows_by_degree(in_degree: Any, node: Any, row: Any) -> None:
    """Number nodes by falling in-degree, equals in order of id: node ``node[r]`` has row r, ``row`` is the inverse."""
    largest = 0
    for i in range(in_degree.size):
        largest = max(largest, in_degree[i])
    begin = np.zeros(largest + 2, np.int64)
    for i in range(in_degree.size):
        begin[largest - in_degree[i] + 1] += 1
    for d in range(1, begin.size):
        begin[d] += begin[d - 1]
    for i in range(in_degree.size):
        at = largest - in_degree[i]
        node[begin[at]] = i
        row[i] = begin[at]
        begin[at] += 1


@numba.njit(cache=True, nogil=True)
def fill_slices(
    src: Any, dst: Any, row: Any, long_rows: int, steps: Any, next_place: Any, sources: Any, edge_order: Any
) -> None:
    """Put each edge into its row, in the order of the edges, and fill what is left of each row.

    ``next_place[r]`` is where the next entry of row r belongs: entries of a long row lie side by side, those of the
    other rows ``LANES`` apart. ``sources`` gets the row of each entry's source, ``row.size`` where there is no edge;
    ``edge_order``, where it is not empty, the edge that each entry came from, or -1.
    """
    begins = next_place.copy()
    for e in range(dst.size):
        r = row[dst[e]]
        at = next_place[r]
        next_place[r] = at + (1 if r < long_rows else LANES)
        sources[at] = row[src[e]]
        if edge_order.size:
            edge_order[at] = e
    for r in range(next_place.size):
        for at in range(next_place[r], begins[r] + steps[r] * LANES, 1 if r < long_rows else LANES):
            sources[at] = row.size
            if edge_order.size:
                edge_order[at] = -1


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sweep(
    first: int,
    last: int,
    long_rows: int,
    begins: Any,
    steps: Any,
    sources: Any,
    shares: Any,
    sent: Any,
    out: Any,
    teleport: Any,
    landing: Any,
    keep: float,
    to_teleport: float,
    to_landing: float,
    scores: Any,
    sent_next: Any,
) -> tuple[float, float, float, float]:
    """One round for the slices ``first`` to ``last``, of ``LANES`` rows each: sum what arrives, then update.

    ``score = keep * arrived + to_teleport * teleport + to_landing * landing``. Reads what each node sends along an edge
    (``sent``), updates ``scores`` in place, writes ``sent_next``: the same array for Gauss-Seidel. A slice of long rows
    has one ``begins`` and ``steps`` for each of them, at ``r``; each other slice one, at the first of its rows.
    ``shares`` is None, or the share of each entry. ``out`` is 1 / out-degree, or 1 with ``shares``; 0 marks a dangling
    node.

    Returns:
        The rows' part of the L1 step, of the new dangling mass, of ``sum(additions of the row * score)``, from which
        the round-off is bounded, and of the sum of scores.
    """
    arrived, one_row = np.empty(LANES), np.empty(LANES)
    all_of_it = np.zeros(4)
    for tile in range(first, last, TILE):
        step, dangling, gathered, total = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
        for slice_ in range(tile, min(tile + TILE, last)):
            base, chain = slice_ * LANES, 0.0
            if base < long_rows:
                chain = LANES
                for lane in range(LANES):
                    j = base + lane
                    if shares is None:
                        add_gathered(sent, sources, begins[j], steps[j], one_row)
                    else:
                        add_gathered_shares(sent, sources, shares, begins[j], steps[j], one_row)
                    arrived[lane] = one_row.sum()
            elif shares is None:
                add_gathered(sent, sources, begins[base], steps[base], arrived)
            else:
                add_gathered_shares(sent, sources, shares, begins[base], steps[base], arrived)
            for lane in range(LANES):
                j = base + lane
                score = keep * arrived[lane] + to_teleport * teleport[j] + to_landing * landing[j]
                step[lane] += abs(score - scores[j])
                dangling[lane] += score if out[j] == 0.0 else 0.0
                gathered[lane] += (steps[j] + chain) * score
                total[lane] += score
                scores[j] = score
                sent_next[j] = score * out[j]
        all_of_it[0] += step.sum()
        all_of_it[1] += dangling.sum()
        all_of_it[2] += gathered.sum()
        all_of_it[3] += total.sum()
    return all_of_it[0], all_of_it[1], all_of_it[2], all_of_it[3]
