"""Compare a round of PageRank with the limits of memory: a random read for each edge, and the ids read in order.

Usage: python benchmarks/comparisons/pagerank_limits.py [--graphs uni,rmat] [--turns 15]

``gather`` reads one float32 for each edge from a random place of a vector with one value per node, and sums them. The
ids of these places lie in order, and it does nothing else. It uses the sixteen-fold instruction or single loads,
whichever is faster here. ``ids`` only reads the ids. ``round`` is the time of one more iteration of :func:`pagerank`: a
fourth of the difference between six and two. All use the same threads and take turns. A figure is the median over turns
with the quartiles; a ratio is the median of the turns' ratios. Random places have no order that a cache could use. The
edges of a graph may have one, if few nodes have most of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

from pdlcheck.primitives.pagerank import Graph, pagerank
from pdlcheck.primitives.pagerank.datasets import rmat, uniform
from pdlcheck.primitives.pagerank.gathering import LANES, add_gathered
from pdlcheck.primitives.pagerank.threads import Team, ranges

GRAPHS: dict[str, Callable[[], Graph]] = {"uni": uniform, "rmat": rmat}
LONGER, SHORTER = 6, 2  # numbers of rounds


@numba.njit(nogil=True)
def gather_sixteen(values: Any, places: Any, first: int, last: int, sums: Any) -> None:
    for at in range(first, last, 1 << 10):
        add_gathered(values, places, None, at, min(at + (1 << 10), last), sums)


@numba.njit(nogil=True, fastmath=True)
def gather_single(values: Any, places: Any, first: int, last: int, sums: Any) -> None:
    total = np.float32(0)
    for at in range(first, last):
        total += values[places[at]]
    sums[0] += total


def read_ids(values: Any, places: Any, first: int, last: int, sums: Any) -> None:
    sums[0] = places[first:last].max()


def seconds_of(team: Team, loop: Callable[..., None], values: Any, places: Any) -> float:
    parts, sums = ranges(len(places) // LANES, team.size), np.zeros((team.size, LANES))
    start = time.perf_counter()
    team.run(lambda k: loop(values, places, parts[k][0] * LANES, parts[k][1] * LANES, sums[k]))
    return time.perf_counter() - start


def seconds_of_round(graph: Graph) -> float:
    seconds = []
    for rounds in (SHORTER, LONGER):
        start = time.perf_counter()
        pagerank(graph, tol=1e-300, max_iter=rounds)
        seconds.append(time.perf_counter() - start)
    return (seconds[1] - seconds[0]) / (LONGER - SHORTER)


def measured(graph: Graph, turns: int) -> dict[str, list[float]]:
    """Return the milliseconds of each turn; a first turn that compiles code and touches memory is left out."""
    draw = np.random.default_rng(0)
    values = draw.random(graph.num_nodes, np.float32)
    places = draw.integers(0, graph.num_nodes, graph.num_edges, np.int32)
    found: dict[str, list[float]] = {name: [] for name in ("gather16", "gather1", "ids", "round")}
    with Team(os.cpu_count() or 1) as team:
        for turn in range(turns + 1):
            each = {
                "gather16": seconds_of(team, gather_sixteen, values, places),
                "gather1": seconds_of(team, gather_single, values, places),
                "ids": seconds_of(team, read_ids, values, places),
                "round": seconds_of_round(graph),
            }
            for name, seconds in each.items() if turn else ():
                found[name].append(seconds * 1e3)
    return found


def row(name: str, found: dict[str, list[float]]) -> str:
    best = min(("gather16", "gather1"), key=lambda gather: statistics.median(found[gather]))
    ratio = statistics.median(ours / limit for ours, limit in zip(found["round"], found[best], strict=True))
    cells = {"gather": found[best], "ids": found["ids"], "round": found["round"]}
    return f"{name}, ms: " + ", ".join(f"{word} {spread(times)}" for word, times in cells.items()) + f"; {ratio:.2f}"


def spread(times: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="uni,rmat", help="of uni,rmat; default: both")
    parser.add_argument("--turns", type=int, default=15, help="default: 15")
    arguments = parser.parse_args()
    print("a round over the random reads that it needs, median of the turns' ratios, is at the end of a line")
    for name in arguments.graphs.split(","):
        print(row(name, measured(GRAPHS[name](), arguments.turns)), flush=True)


if __name__ == "__main__":
    main()
