"""A plain PageRank with a switch for each mistake, and small graphs that reveal the mistakes."""

from __future__ import annotations

import numpy as np

from pdlcheck.checks.graphs import Edges

D = 0.85


def edges(src, dst, num_nodes, weights=None):
    ids = np.array(src, np.int64), np.array(dst, np.int64)
    return Edges(*ids, num_nodes, None if weights is None else np.array(weights, float))


def twin(
    graph,
    *,
    rounds=400,
    damping=D,
    drop_dangling=False,
    dangling_stays=False,
    start=None,
    teleport_nodes=None,
    transposed=False,
    in_degree=False,
    no_division=False,
    self_loops="kept",
    repeated="kept",
    weighted=True,
    dtype=np.float64,
    swap_damping=False,
    leaf=None,
):
    src, dst, n = graph.src, graph.dst, graph.num_nodes
    weights = np.ones(len(src)) if graph.weights is None or not weighted else graph.weights
    if transposed:
        src, dst = dst, src
    if self_loops == "dropped":
        proper = src != dst
        src, dst, weights = src[proper], dst[proper], weights[proper]
    _, once = np.unique(np.stack([src, dst]), axis=1, return_index=True)
    if repeated == "collapsed":
        src, dst, weights = src[once], dst[once], weights[once]
    counted = once if repeated == "collapsed in degree" else np.arange(len(src))
    degree = np.bincount(src[counted], weights[counted], n)
    if in_degree:
        degree = np.bincount(dst, weights, n)
    kept = np.ones(len(src), bool)
    if self_loops == "dropped from sum":
        kept = src != dst
    if repeated == "collapsed in sum":
        kept = np.isin(np.arange(len(src)), once)
    share = np.divide(1.0, degree, out=np.zeros(n), where=degree > 0) if not no_division else np.ones(n)
    d = 1 - damping if swap_damping else damping
    x = np.full(n, 1 / max(n, 1) if start is None else start, dtype)
    for _ in range(rounds):
        arrived = np.bincount(dst[kept], (weights * (x * share)[src])[kept], n)
        if dangling_stays:
            arrived = arrived + np.where(degree == 0, x, 0)
        elif not drop_dangling:
            arrived = arrived + x[degree == 0].sum() / max(n, 1)
        jump = 1 if start == 1 else 1 / max(n if teleport_nodes is None else teleport_nodes(graph), 1)
        x = ((1 - d) * jump + d * arrived).astype(dtype)
        if no_division and x.sum() > 1e100:
            break
    if leaf is not None and n == 1:
        x[:] = leaf
    return x


def power(transition):
    """Return the fixed point of a matrix, without any treatment of dangling nodes."""
    n = len(transition)
    return np.linalg.solve(np.eye(n) - D * transition, np.full(n, (1 - D) / max(n, 1)))


def matrix(graph, *, transposed=False, counted="all", loops=True, degree_of=None, dtype=np.float64):
    dense = np.zeros((graph.num_nodes, graph.num_nodes))
    weights = np.ones(len(graph.src)) if graph.weights is None else graph.weights
    np.add.at(dense, (graph.dst, graph.src), weights)
    degree = dense.sum(axis=0)
    if degree_of is not None:
        degree = np.bincount(degree_of.src, minlength=graph.num_nodes)
    if counted == "once":
        dense = np.minimum(dense, 1)
    if not loops:
        np.fill_diagonal(dense, 0)
    dense = np.divide(dense, degree, out=np.zeros_like(dense), where=degree > 0)
    return (dense.T if transposed else dense).astype(dtype)


def only_connected(graph):
    """Return the number of nodes with edges, which are all that some readers of edge lists see."""
    return len(np.union1d(graph.src, graph.dst))


ISOLATED = edges([0, 1], [1, 0], 3)
PLAIN = edges([0, 0, 1, 2, 3, 3], [1, 2, 2, 0, 0, 2], 4)
DANGLING = edges([0, 0, 1], [1, 2, 2], 3)
LOOPS = edges([0, 0, 1, 2], [0, 1, 2, 0], 3)
REPEATED = edges([0, 0, 0, 1, 2, 3], [1, 1, 2, 0, 0, 1], 4)
WEIGHTED = edges([0, 0, 1, 2, 3], [1, 2, 0, 0, 1], 4, [1, 5, 1, 1, 1])
ONE = edges([], [], 1)
