"""The random graph that the four versions were published with."""

from __future__ import annotations

import networkx as nx
import numpy as np

from pdlcheck.primitives.pagerank.graph import Graph

__all__ = ["document_graph"]


def document_graph(num_nodes: int = 10_000, *, mean_degree: float = 10.0, seed: int = 0) -> Graph:
    """Return a directed Erdos-Renyi graph from networkx, plus the ring i -> i + 1 that gives every node an out-edge.

    Each ordered pair of nodes is an edge with probability ``mean_degree / (num_nodes - 1)``. A ring edge that was drawn
    already is not added again. So there are no multi-edges, and about ``num_nodes * (mean_degree + 1)`` edges. The
    published code used ``num_nodes=10_000`` and probability 0.05, which is ``mean_degree=500``.

    Args:
        num_nodes: 2 or more.
        mean_degree: the average number of out-edges of a node before the ring, in [0, num_nodes - 1].
        seed: the same seed gives the same graph.

    Raises:
        ValueError: an argument is outside its range.

    Example:
        >>> document_graph(4, mean_degree=0)
        Graph(num_nodes=4, num_edges=4, weighted=False)
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes must be 2 or more to have a ring, got {num_nodes}")
    if not 0 <= mean_degree <= num_nodes - 1:
        raise ValueError(f"mean_degree must be in [0, {num_nodes - 1}] for {num_nodes} nodes, got {mean_degree}")
    random = nx.fast_gnp_random_graph(num_nodes, mean_degree / (num_nodes - 1), seed=seed, directed=True)
    random.add_edges_from((i, (i + 1) % num_nodes) for i in range(num_nodes))
    edges = np.fromiter((node for edge in random.edges for node in edge), np.int64).reshape(-1, 2)
    return Graph(edges[:, 0], edges[:, 1], num_nodes)
