"""Random graphs of any size, made by numpy alone: edges spread evenly, or concentrated on few nodes."""

from __future__ import annotations

import numpy as np

from pdlcheck.primitives.pagerank.graph import Graph

__all__ = ["rmat", "uniform"]

CHUNK = 1 << 16  # edges drawn at a time, so that they stay in the cache; another value gives another graph


def uniform(num_nodes: int = 1 << 20, num_edges: int = 16_000_000, *, dangling: float = 0.1, seed: int = 0) -> Graph:
    """Return a graph whose edges go from a node that is not dangling to any node, drawn uniformly and independently.

    There are few self-loops and repeated edges. The edges are in no order.

    Args:
        num_nodes: 1 or more.
        num_edges: 0 or more.
        dangling: the share of the nodes that get no out-edge, rounded down to whole nodes, in [0, 1).
        seed: the same seed gives the same graph.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> uniform(1000, 20_000, dangling=0.25).dangling.sum()
        np.int64(250)
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be 1 or more, got {num_nodes}")
    if num_edges < 0:
        raise ValueError(f"num_edges must be 0 or more, got {num_edges}")
    if not 0 <= dangling < 1:
        raise ValueError(f"dangling must be in [0, 1), the share of nodes without an out-edge, got {dangling}")
    rng = np.random.default_rng(seed)
    senders = rng.permutation(num_nodes)[int(num_nodes * dangling) :]
    src = senders[rng.integers(len(senders), size=num_edges)]
    return Graph(src, rng.integers(num_nodes, size=num_edges), num_nodes)


def rmat(
    scale: int = 20,
    num_edges: int = 17_400_000,
    *,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    seed: int = 0,
) -> Graph:
    """Return a recursive-matrix graph: in- and out-degrees of nodes differ by orders of magnitude, as on the web.

    The adjacency matrix (row = source) is cut into quadrants again and again. At each cut an edge falls into the upper
    left quadrant with probability ``a``, upper right ``b``, lower left ``c``, and lower right ``1 - a - b - c``. Then
    ids are shuffled, so that they do not depend on the degree. Repeated edges and self-loops stay. The edges are in no
    order.

    Args:
        scale: the number of nodes is ``2**scale``; 1 to 40.
        num_edges: 0 or more.
        a: the probability of the upper left quadrant. The defaults of ``a``, ``b`` and ``c`` are those of Graph500.
        b: the probability of the upper right quadrant.
        c: the probability of the lower left quadrant. None of the three is negative, and their sum is 1 at most.
        seed: the same seed gives the same graph.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> rmat(10, 16_000)
        Graph(num_nodes=1024, num_edges=16000, weighted=False)

    Source: Chakrabarti, Zhan and Faloutsos, "R-MAT: A recursive model for graph mining", SDM 2004.
    """
    if not 1 <= scale <= 40:
        raise ValueError(f"scale must be in [1, 40], the logarithm of the number of nodes, got {scale}")
    if num_edges < 0:
        raise ValueError(f"num_edges must be 0 or more, got {num_edges}")
    if not (min(a, b, c) >= 0 and a + b + c <= 1 + 1e-12):
        raise ValueError(f"a, b and c must be probabilities with a sum of 1 at most, got {a}, {b}, {c}")
    rng = np.random.default_rng(seed)
    src, dst = np.empty(num_edges, np.int64), np.empty(num_edges, np.int64)
    for begin in range(0, num_edges, CHUNK):
        count = min(CHUNK, num_edges - begin)
        row, column = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for _ in range(scale):
            where = rng.random(count, np.float32)
            low, right = where >= a + b, where >= a
            right ^= low  # the upper right quadrant
            right |= where >= a + b + c
            row += row + low
            column += column + right
        src[begin : begin + count], dst[begin : begin + count] = row, column
    ids = rng.permutation(1 << scale)
    return Graph(ids[src], ids[dst], 1 << scale)
