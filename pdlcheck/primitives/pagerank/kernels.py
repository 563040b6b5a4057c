"""The compiled loops of the fast solver. They release the GIL, so that Python threads can share one sweep."""

from __future__ import annotations

from typing import Any

import numba

__all__ = ["TILE", "pull_csr", "sweep"]

TILE = 1024  # rows whose sums are added apart, so that a long sum rounds like two short ones


@numba.njit(cache=True, nogil=True)
def pull_csr(src: Any, dst: Any, row: Any, fill: Any, sources: Any, edge_order: Any) -> None:
    """Counting sort of the edges by the row of ``dst``; node i has row ``row[i]``.

    ``fill[r]`` is where row r begins and ends up where it ends. ``sources`` gets the row of each entry's
    source; ``edge_order``, where it is not empty, the edge that each entry came from.
    """
    for e in range(dst.size):
        r = row[dst[e]]
        at = fill[r]
        sources[at] = row[src[e]]
        if edge_order.size:
            edge_order[at] = e
        fill[r] = at + 1


@numba.njit(cache=True, nogil=True)
def sweep(
    first: int,
    last: int,
    indptr: Any,
    sources: Any,
    shares: Any,
    out: Any,
    teleport: Any,
    landing: Any,
    damping: float,
    dangling_mass: float,
    sent: Any,
    scores: Any,
    sent_next: Any,
) -> tuple[float, float, float]:
    """One round of the power iteration for the rows ``first`` to ``last``.

    Reads what each node sends along an edge (``sent``), updates ``scores`` in place, writes ``sent_next``.
    ``shares`` is None, or the share of each entry. ``out`` is 1 / out-degree, or 1 with ``shares``; 0 marks
    a dangling node. ``teleport`` and ``landing`` hold one number for all nodes, or one per node.

    Returns:
        The rows' part of the L1 step, of the new dangling mass, and of ``sum(in-degree * score)``, from which
        the round-off is bounded.
    """
    step = dangling = gathered = 0.0
    each_teleport, each_landing = teleport.size > 1, landing.size > 1
    for tile in range(first, last, TILE):
        tile_step = tile_dangling = tile_gathered = 0.0
        for j in range(tile, min(tile + TILE, last)):
            begin, end = indptr[j], indptr[j + 1]
            a = b = c = d = 0.0  # four sums, or each addition waits for the one before
            k = begin
            if shares is None:
                while k + 4 <= end:
                    a += sent[sources[k]]
                    b += sent[sources[k + 1]]
                    c += sent[sources[k + 2]]
                    d += sent[sources[k + 3]]
                    k += 4
                while k < end:
                    a += sent[sources[k]]
                    k += 1
            else:
                while k + 4 <= end:
                    a += shares[k] * sent[sources[k]]
                    b += shares[k + 1] * sent[sources[k + 1]]
                    c += shares[k + 2] * sent[sources[k + 2]]
                    d += shares[k + 3] * sent[sources[k + 3]]
                    k += 4
                while k < end:
                    a += shares[k] * sent[sources[k]]
                    k += 1
            arrived = (a + b) + (c + d) + dangling_mass * landing[j if each_landing else 0]
            score = (1.0 - damping) * teleport[j if each_teleport else 0] + damping * arrived
            tile_step += abs(score - scores[j])
            tile_gathered += (end - begin) * score
            scores[j] = score
            sent_next[j] = score * out[j]
            if out[j] == 0.0:
                tile_dangling += score
        step += tile_step
        dangling += tile_dangling
        gathered += tile_gathered
    return step, dangling, gathered
