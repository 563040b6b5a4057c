"""Graphs to rank: the random graph that the versions were published with, and the Debian dependencies."""

from __future__ import annotations

from importlib.resources import files

import networkx as nx
import numpy as np

from pdlcheck.primitives.pagerank.graph import Graph

__all__ = ["debian_dependencies", "document_graph", "pack_dependencies"]

DEBIAN = "debian_bookworm.npz"


def document_graph(num_nodes: int = 10_000, *, mean_degree: float = 10.0, seed: int = 0) -> Graph:
    """A directed Erdos-Renyi graph from networkx, plus the ring i -> i + 1 that gives every node an out-edge.

    Each ordered pair of nodes is an edge with probability ``mean_degree / (num_nodes - 1)``; a ring edge
    that was drawn already is not added again, so there are no multi-edges and about ``num_nodes *
    (mean_degree + 1)`` edges. The published code used ``num_nodes=10_000`` and probability 0.05, which is
    ``mean_degree=500``.

    Args:
        num_nodes: 2 or more.
        mean_degree: out-edges that a node has on average before the ring, in [0, num_nodes - 1].
        seed: same seed, same graph.

    Raises:
        ValueError: an argument outside its range.

    Example:
        >>> document_graph(4, mean_degree=0)
        Graph(num_nodes=4, num_edges=4, weighted=False)
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes must be 2 or more to have a ring, got {num_nodes}")
    if not 0 <= mean_degree <= num_nodes - 1:
        raise ValueError(
            f"mean_degree must be in [0, {num_nodes - 1}] for {num_nodes} nodes, got {mean_degree}"
        )
    random = nx.fast_gnp_random_graph(num_nodes, mean_degree / (num_nodes - 1), seed=seed, directed=True)
    random.add_edges_from((i, (i + 1) % num_nodes) for i in range(num_nodes))
    edges = np.fromiter((node for edge in random.edges for node in edge), np.int64).reshape(-1, 2)
    return Graph(edges[:, 0], edges[:, 1], num_nodes)


def debian_dependencies() -> Graph:
    """The packages of Debian 12 (bookworm, main, amd64) and what they depend on; nodes are named by package.

    An edge ``a -> b``: b can satisfy an item of a's Depends or Pre-Depends. The rules, and the way to derive
    the file again, are in ``ci/derive_debian_graph.py``. The copy in the package is pinned, so ranks do
    not move.

    Example:
        >>> debian_dependencies().num_nodes > 60_000
        True
    """
    path = files("pdlcheck.primitives.pagerank").joinpath(DEBIAN)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as packed:
        names = tuple(packed["names"].tobytes().decode("ascii").split("\n"))
        degree = packed["out_degree"].astype(np.int64)
        gaps = packed["dst_gaps"].astype(np.int64)
    src = np.repeat(np.arange(len(names)), degree)
    total = np.cumsum(gaps)
    before = np.concatenate([[0], total])[
        np.cumsum(degree) - degree
    ]  # the running sum where each node starts
    return Graph(src, total - np.repeat(before, degree), len(names), names=names)


def pack_dependencies(graph: Graph) -> dict[str, np.ndarray]:
    """The arrays of the packaged file: out-degrees, gaps between a node's sorted targets, and the names."""
    order = np.lexsort((graph.dst, graph.src))
    src, dst = graph.src[order], graph.dst[order]
    degree = np.bincount(src, minlength=graph.num_nodes)
    first = (np.cumsum(degree) - degree)[degree > 0]
    gaps = np.diff(dst, prepend=0)
    gaps[first] = dst[first]
    names = np.frombuffer("\n".join(map(str, graph.names or ())).encode("ascii"), np.uint8)
    return {"names": names, "out_degree": degree.astype(np.uint16), "dst_gaps": gaps.astype(np.uint32)}
