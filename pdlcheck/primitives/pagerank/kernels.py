"""The compiled loops of the fast solver. They release the GIL, so that Python threads can share one sweep.

They allocate nothing and call no numpy function: each such call adds a tenth of a second or more to the compilation.
"""

from __future__ import annotations

from typing import Any

from pdlcheck.primitives.pagerank.compiled import compiled
from pdlcheck.primitives.pagerank.gathering import (
    FIRST_COUNTER,
    LANES,
    NUM_SUMS,
    add_gathered,
    meet,
    move,
    take_next,
    update_rows,
)

__all__ = ["TILE", "count_degrees", "deal_rows", "deal_to_blocks", "deal_to_rows", "sweep"]

TILE = 64  # slices per partial sum, so that a long sum rounds like two short ones


@compiled(error_model="numpy")
def count_degrees(
    first: int, last: int, src: Any, dst: Any, of: Any, step: int, out_degree: Any, in_degree: Any
) -> None:
    """Add ``step`` to the degrees of both ends of each edge from ``first`` to ``last``, exclusive.

    If ``of``, one bool per node, is not empty, only the edges that leave these nodes count.
    """
    of_all = of.size == 0
    for e in range(first, last):
        if of_all or of[src[e]]:
            out_degree[src[e]] += step
            in_degree[dst[e]] += step


@compiled(error_model="numpy")
def deal_rows(place: Any, next_row: Any, first_whole: Any, last_whole: Any, row: Any) -> None:
    """Set ``row``: number the nodes by place, ascending, and deal the nodes of one place to its whole slices in turn.

    The nodes of place k get the rows from ``next_row[k]`` on. Nodes of equal place that follow each other by id go to
    consecutive slices, because nodes with close ids are often neighbours. The rows of one slice are updated at the same
    time, so none of them reads the new scores of the others. The remaining nodes, before the first whole slice of their
    place and after the last one, are in order of id. Nodes of place -1 are left out.
    """
    for i in range(place.size):
        k = place[i]
        if k < 0:
            continue
        row[i] = at = next_row[k]
        if first_whole[k] <= at < last_whole[k] - 1:
            at += LANES
            next_row[k] = at if at < last_whole[k] else at - (last_whole[k] - first_whole[k]) + 1
        else:
            next_row[k] = at + 1


@compiled(error_model="numpy")
def deal_to_blocks(
    first: int,
    last: int,
    src: Any,
    dst: Any,
    edge_shares: Any,
    row: Any,
    last_row: int,
    block_of: Any,
    bounds: Any,
    next_place: Any,
    rows: Any,
    sources: Any,
    shares: Any,
) -> None:
    """Put the edges from ``first`` to ``last`` into the blocks of their rows, in order.

    Edges are sorted into blocks only, not into rows, so that writes stay in cache. Edges that leave a row after
    ``last_row`` are left out. ``block_of`` is the block of each slice. ``next_place`` is the place of the next edge of
    each block. At this place ``sources`` gets the row of the edge's source, ``rows`` its own row, counted from the
    first row of the block, and ``shares`` its share.
    """
    for e in range(first, last):
        source = row[src[e]]
        if source > last_row:
            continue
        r = row[dst[e]]
        block = block_of[r // LANES]
        at = next_place[block]
        next_place[block] = at + 1
        rows[at] = r - bounds[block] * LANES
        sources[at] = source
        if shares is not None:
            shares[at] = edge_shares[e]


@compiled(error_model="numpy")
def deal_to_rows(
    counter: Any,
    bounds: Any,
    long_rows: int,
    begins: Any,
    counts: Any,
    empty_row: int,
    rows: Any,
    sources: Any,
    shares: Any,
    next_place: Any,
    held: Any,
    held_shares: Any,
) -> None:
    """Put the edges of each block into their rows, in order.

    The ``counts[block]`` edges of a block are side by side. Entries of a long row are side by side as well; entries of
    other rows are LANES apart. Places without an edge get ``empty_row`` and the share 0. ``next_place``, ``held`` and
    ``held_shares`` are buffers of this thread alone. Threads take the next block from ``counter``.
    """
    block = take_next(counter, 0)
    while block < bounds.size - 1:
        base, last = bounds[block] * LANES, bounds[block + 1] * LANES
        at_first = begins[base if base < long_rows else long_rows + (base - long_rows) // LANES]
        for r in range(base, last):
            if r < long_rows:
                next_place[r - base] = begins[r]
            else:
                next_place[r - base] = begins[long_rows + (r - long_rows) // LANES] + (r - long_rows) % LANES
        for k in range(counts[block]):
            held[k] = sources[at_first + k]
            if shares is not None:
                held_shares[k] = shares[at_first + k]
        for k in range(counts[block]):
            r = rows[at_first + k]
            at = next_place[r]
            next_place[r] = at + (1 if base + r < long_rows else LANES)
            sources[at] = held[k]
            if shares is not None:
                shares[at] = held_shares[k]
        for r in range(base, last):
            end, apart = begins[r + 1] if r < long_rows else begins[long_rows + (r - long_rows) // LANES + 1], LANES
            if r < long_rows:
                apart = 1
            for at in range(next_place[r - base], end, apart):
                sources[at] = empty_row
                if shares is not None:
                    shares[at] = 0.0
        block = take_next(counter, 0)


@compiled(error_model="numpy")
def sweep(
    counters: Any,
    member: int,
    size: int,
    chunks: Any,
    bounds: Any,
    long_rows: int,
    begins: Any,
    sources: Any,
    shares: Any,
    keep: float,
    to_base: float,
    to_landing: float,
    base: Any,
    landing: Any,
    out: Any,
    leaving: Any,
    sent: Any,
    before: Any,
    scores: Any,
    fresh: Any,
    moves: bool,
    room: Any,
    parts: Any,
) -> None:
    """Run one round for the blocks from ``chunks[0]`` to ``chunks[-1]``, together with the other threads that call it.

    Block b is the slices ``bounds[b]`` to ``bounds[b + 1]``, of ``LANES`` rows each. For each slice the function sums
    the values that arrive, then calls :func:`update_rows`. The entries of one of the first ``long_rows`` rows are from
    ``begins[row]`` to the next. The entries of each later slice follow in the same way, one entry of each row in turn.

    The values that rows will send go to ``fresh``. With ``moves``, they begin there at the first row of their chunk,
    and they move to ``sent`` when all ``size`` threads have completed the chunk. Without it, each value goes to the
    place of its row. So later chunks read the new values of earlier ones. Scores go to ``scores``, unless that is
    empty.

    ``counters``, shared by all threads, are two for :func:`meet` and the next block of each chunk. ``room`` is a buffer
    of this thread alone. ``parts[b]`` gets the sums of block b, which do not depend on the thread that computes them.
    """
    arrived, one_row, sums = room[:LANES], room[LANES : 2 * LANES], room[2 * LANES :]
    for chunk in range(chunks.size - 1):
        last_block = chunks[chunk + 1]
        first_row = bounds[chunks[chunk]] * LANES if moves else 0
        block = take_next(counters, FIRST_COUNTER + chunk)
        while block < last_block:
            for number in range(NUM_SUMS):
                parts[block, number] = 0.0
            for tile in range(bounds[block], bounds[block + 1], TILE):
                for lane in range(NUM_SUMS * LANES):
                    sums[lane] = 0.0
                for slice_ in range(tile, min(tile + TILE, bounds[block + 1])):
                    row = slice_ * LANES
                    if row < long_rows:
                        longest = 0
                        for lane in range(LANES):
                            begin, end = begins[row + lane], begins[row + lane + 1]
                            add_gathered(sent, sources, shares, begin, end, one_row)
                            total = 0.0
                            for k in range(LANES):
                                total += one_row[k]
                            arrived[lane] = total
                            longest = max(longest, end - begin)
                        additions = longest // LANES + LANES
                    else:
                        unit = long_rows + (row - long_rows) // LANES
                        begin, end = begins[unit], begins[unit + 1]
                        add_gathered(sent, sources, shares, begin, end, arrived)
                        additions = (end - begin) // LANES
                    update_rows(
                        arrived,
                        additions + 16.0,
                        keep,
                        to_base,
                        to_landing,
                        base,
                        landing,
                        out,
                        leaving,
                        sent,
                        before,
                        scores,
                        scores.size > 0,
                        row,
                        fresh,
                        row - first_row,
                        sums,
                    )
                for number in range(NUM_SUMS):
                    total = 0.0
                    for lane in range(LANES):
                        total += sums[number * LANES + lane]
                    parts[block, number] += total
            block = take_next(counters, FIRST_COUNTER + chunk)
        if moves:
            meet(counters, size)
            slices = bounds[last_block] - bounds[chunks[chunk]]
            for slice_ in range(slices * member // size, slices * (member + 1) // size):
                move(fresh, slice_ * LANES, sent, first_row + slice_ * LANES)
            meet(counters, size)
