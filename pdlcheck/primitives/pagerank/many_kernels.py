"""The compiled sweep for LANES vectors at once: one entry of the matrix serves all of them, from one line of cache."""

from __future__ import annotations

from typing import Any

from pdlcheck.primitives.pagerank.compiled import compiled
from pdlcheck.primitives.pagerank.gathering import (
    FIRST_COUNTER,
    LANES,
    NUM_SUMS,
    add_rows,
    meet,
    move,
    take_next,
    update_rows,
)
from pdlcheck.primitives.pagerank.kernels import TILE

__all__ = ["sweep_many"]

PART = 512  # entries of a row per partial sum, so that a long sum rounds like two short ones


@compiled(error_model="numpy")
def sweep_many(
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
    to_base: Any,
    to_landing: Any,
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
    """Run one round like :func:`sweep`, for LANES vectors; each row stores LANES numbers, one per vector.

    ``parts[b]`` has LANES numbers for each sum.
    """
    arrived, of_part, sums = room[:LANES], room[LANES : 2 * LANES], room[2 * LANES :]
    for chunk in range(chunks.size - 1):
        last_block = chunks[chunk + 1]
        first_row = bounds[chunks[chunk]] * LANES if moves else 0
        block = take_next(counters, FIRST_COUNTER + chunk)
        while block < last_block:
            for number in range(NUM_SUMS):
                for lane in range(LANES):
                    parts[block, number, lane] = 0.0
            for tile in range(bounds[block], bounds[block + 1], TILE):
                for lane in range(NUM_SUMS * LANES):
                    sums[lane] = 0.0
                for row in range(tile * LANES, min(tile + TILE, bounds[block + 1]) * LANES):
                    if row < long_rows:
                        begin, end = begins[row], begins[row + 1]
                        for lane in range(LANES):
                            arrived[lane] = 0.0
                        for at in range(begin, end, PART):
                            add_rows(sent, sources, shares, at, min(at + PART, end), 1, of_part)
                            for lane in range(LANES):
                                arrived[lane] += of_part[lane]
                        weight = PART + (end - begin) / PART + 16.0
                    else:
                        unit = long_rows + (row - long_rows) // LANES
                        begin, end = begins[unit] + row % LANES, begins[unit + 1]
                        add_rows(sent, sources, shares, begin, end, LANES, arrived)
                        weight = (end - begin) / LANES + 16.0
                    update_rows(
                        arrived,
                        weight,
                        keep,
                        to_base,
                        to_landing,
                        base,
                        landing,
                        out[row],
                        leaving[row],
                        sent,
                        before,
                        scores,
                        scores.size > 0,
                        row * LANES,
                        fresh,
                        (row - first_row) * LANES,
                        sums,
                    )
                for number in range(NUM_SUMS):
                    for lane in range(LANES):
                        parts[block, number, lane] += sums[number * LANES + lane]
            block = take_next(counters, FIRST_COUNTER + chunk)
        if moves:
            meet(counters, size)
            rows = bounds[last_block] * LANES - first_row
            for row in range(rows * member // size, rows * (member + 1) // size):
                move(fresh, row * LANES, sent, (first_row + row) * LANES)
            meet(counters, size)
