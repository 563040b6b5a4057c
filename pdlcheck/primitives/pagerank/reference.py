"""PageRank by one dense linear solve: slow and direct, without an iteration that could stop early."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdlcheck.primitives.pagerank.arguments import distribution, require_damping, require_memory
from pdlcheck.primitives.pagerank.formats import as_graph
from pdlcheck.primitives.pagerank.graph import Float64
from pdlcheck.primitives.pagerank.memory import DENSE

__all__ = ["pagerank_reference"]


def pagerank_reference(
    graph: Any, *, damping: float = 0.85, personalization: Any = None, dangling: Any = None
) -> Float64:
    """Return the scores as the solution of ``(I - d (P + w 1_D^T)) x = (1 - d) v`` in float64.

    ``P[j, i]`` is the share of i's out-weight that goes to j. ``v`` is the teleport vector and ``w`` the dangling
    vector. ``1_D`` marks the nodes without out-weight. The condition number is at most ``(1 + d)/(1 - d)`` in the
    1-norm, so the error is at most about ``num_nodes * 2e-16 / (1 - d)``. The cost is ``16 N^2`` bytes and ``2/3 N^3``
    operations.

    Args:
        graph: any object that :func:`as_graph` reads.
        damping: d, in [0, 1).
        personalization: v, an array or a dict as in :func:`pagerank`; ``None`` is uniform.
        dangling: w; ``None`` means ``personalization``.

    Returns:
        A float64 array with one score per node and sum 1; empty for a graph without nodes.

    Raises:
        ValueError: an argument is wrong; the message names the cure.
        MemoryError: the dense matrix does not fit in memory.

    Example:
        >>> pagerank_reference(([0, 1], [1, 0])).round(9).tolist()
        [0.5, 0.5]

    Source: Langville and Meyer, "Deeper inside PageRank", Internet Mathematics 1 (2004).
    """
    graph = as_graph(graph)
    damping = require_damping(damping)
    require_memory("pagerank_reference", 16 * graph.num_nodes**2 + DENSE.nbytes(graph))
    teleport = distribution("personalization", personalization, graph)
    landing = teleport if dangling is None else distribution("dangling", dangling, graph)
    system = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(system, (graph.dst, graph.src), graph.probabilities)
    system[:, graph.dangling] = landing[:, None]
    system *= -damping
    system[np.diag_indices(graph.num_nodes)] += 1
    return np.asarray(np.linalg.solve(system, (1 - damping) * teleport), np.float64)
