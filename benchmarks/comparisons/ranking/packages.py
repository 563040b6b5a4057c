"""The packages that rank nodes, each called as its documentation recommends.

The claims of a package are those that its own documentation of the function lists; see the source lines.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

from pdlcheck.checks.graphs import Edges
from ranking.peer import Peer, Question, Setting, as_scores

__all__ = ["PACKAGES"]

MAX_ITER = 500  # 0.95**500 is 7e-12
EVERYTHING = frozenset({"weights", "personalization", "dangling weights"})


def _as_dict(values: Any) -> dict[int, float] | None:
    return None if values is None else dict(enumerate(np.asarray(values, float).tolist()))


def _per_node(error: float, num_nodes: int) -> float:
    """Return the tolerance for packages that stop at a step below ``num_nodes * tol``."""
    return error / max(num_nodes, 1)


# networkx: nx.pagerank; its conversion to SciPy adds the weights of a MultiDiGraph's parallel edges


def _networkx_graph(edges: Edges) -> Any:
    import networkx as nx

    pairs = edges.src * edges.num_nodes + edges.dst
    repeated = len(np.unique(pairs)) < len(pairs)
    graph = (nx.MultiDiGraph if repeated else nx.DiGraph)()
    graph.add_nodes_from(range(edges.num_nodes))
    src, dst = edges.src.tolist(), edges.dst.tolist()
    if edges.weights is None:
        graph.add_edges_from(zip(src, dst, strict=True))
    else:
        graph.add_weighted_edges_from(zip(src, dst, edges.weights.tolist(), strict=True))
    return graph


def _networkx(graph: Any, question: Question, setting: Setting) -> Any:
    import networkx as nx

    stop = {} if setting is None else {"tol": setting, "max_iter": MAX_ITER}
    vectors = {"personalization": _as_dict(question.personalization), "dangling": _as_dict(question.dangling)}
    return nx.pagerank(graph, alpha=question.damping, **vectors, **stop)


# igraph: Graph.pagerank and Graph.personalized_pagerank; PRPACK has no tolerance to set


def _igraph_graph(edges: Edges) -> Any:
    import igraph

    graph = igraph.Graph(edges.num_nodes, np.stack([edges.src, edges.dst], axis=1), directed=True)
    return graph, None if edges.weights is None else edges.weights.tolist()


def _igraph(built: Any, question: Question, setting: Setting) -> Any:
    graph, weights = built
    arguments = {"damping": question.damping, "weights": weights, "implementation": "prpack"}
    if question.personalization is None:
        return graph.pagerank(**arguments)
    return graph.personalized_pagerank(reset=np.asarray(question.personalization, float).tolist(), **arguments)


# NetworKit: centrality.PageRank; its default drops the rank of sinks, and its documentation describes how to keep it


def _networkit_graph(edges: Edges) -> Any:
    import networkit

    weights = np.ones(len(edges.src)) if edges.weights is None else edges.weights
    entries = (weights, (edges.src, edges.dst))
    return networkit.GraphFromCoo(entries, n=edges.num_nodes, weighted=edges.weights is not None, directed=True)


def _networkit(graph: Any, question: Question, setting: Setting) -> Any:
    from networkit import centrality

    tol = {} if setting is None else {"tol": setting}
    sinks = centrality.SinkHandling.DistributeSinks
    algorithm = centrality.PageRank(graph, damp=question.damping, distributeSinks=sinks, **tol)
    algorithm.maxIterations = MAX_ITER  # by default it never ends once a score is NaN
    if setting is not None:
        algorithm.norm = centrality.Norm.L1_NORM
    return algorithm.run().scores()


# rustworkx: rustworkx.pagerank; its documentation states that parallel edges are summed


def _rustworkx_graph(edges: Edges) -> Any:
    import rustworkx

    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(edges.num_nodes))
    src, dst = edges.src.tolist(), edges.dst.tolist()
    if edges.weights is None:
        graph.extend_from_edge_list(list(zip(src, dst, strict=True)))
    else:
        graph.extend_from_weighted_edge_list(list(zip(src, dst, edges.weights.tolist(), strict=True)))
    return graph, None if edges.weights is None else float


def _rustworkx(built: Any, question: Question, setting: Setting) -> Any:
    import rustworkx

    graph, weight_fn = built
    stop = {} if setting is None else {"tol": setting, "max_iter": MAX_ITER}
    vectors = {"personalization": _as_dict(question.personalization), "dangling": _as_dict(question.dangling)}
    return rustworkx.pagerank(graph, alpha=question.damping, weight_fn=weight_fn, **vectors, **stop)


# scikit-network: ranking.PageRank with six solvers; some take a number of iterations, some a tolerance


def _matrix(edges: Edges) -> Any:
    weights = np.ones(len(edges.src)) if edges.weights is None else edges.weights
    return sp.csr_matrix((weights, (edges.src, edges.dst)), shape=(edges.num_nodes, edges.num_nodes))


def _sknetwork(matrix: Any, question: Question, setting: Setting, solver: str) -> Any:
    from sknetwork.ranking import PageRank

    stop = {} if setting is None else {"n_iter": setting} if isinstance(setting, int) else {"tol": setting}
    if solver == "piteration" and setting is not None:
        stop["tol"] = 0.0  # it stops at the number of iterations or at this step
    ranking = PageRank(question.damping, solver=solver, **stop)
    weights = None if question.personalization is None else np.asarray(question.personalization, float)
    return ranking.fit_predict(matrix, weights)


def _sknetwork_peer(solver: str, strict: Setting) -> Peer:
    first = (lambda error, n: 10) if isinstance(strict, int) else (lambda error, n: error)
    return Peer(
        f"scikit-network {solver}",
        "sknetwork",
        _matrix,
        partial(_sknetwork, solver=solver),
        first=first,
        strict=strict,
        claims=frozenset({"weights", "personalization"}),
    )


# graphblas-algorithms: a backend of networkx, called through its own function on its own graph


def _graphblas_graph(edges: Edges) -> Any:
    import graphblas
    from graphblas_algorithms import DiGraph

    weights = np.ones(len(edges.src)) if edges.weights is None else edges.weights
    shape = {"nrows": edges.num_nodes, "ncols": edges.num_nodes}
    matrix = graphblas.Matrix.from_coo(edges.src, edges.dst, weights, dup_op=graphblas.binary.plus, **shape)
    return DiGraph(matrix)


def _graphblas(graph: Any, question: Question, setting: Setting) -> Any:
    from graphblas_algorithms.nxapi import pagerank

    stop = {} if setting is None else {"tol": setting, "max_iter": MAX_ITER}
    vectors = {"personalization": _as_dict(question.personalization), "dangling": _as_dict(question.dangling)}
    return pagerank(graph, alpha=question.damping, **vectors, **stop)


def _no_setting(error: float, num_nodes: int) -> None:
    return None


SIX = {"piteration": 400, "diteration": 400, "RH": 400, "lanczos": 1e-12, "bicgstab": 1e-12, "push": 1e-9}
PACKAGES = [
    Peer("networkx", "networkx", _networkx_graph, _networkx, as_scores, _per_node, 1e-10, EVERYTHING),
    Peer(
        *("igraph prpack", "igraph", _igraph_graph, _igraph),
        first=_no_setting,
        claims=frozenset({"weights", "personalization"}),
    ),
    Peer("NetworKit", "networkit", _networkit_graph, _networkit, strict=1e-12, claims=frozenset({"weights"})),
    Peer("rustworkx", "rustworkx", _rustworkx_graph, _rustworkx, as_scores, _per_node, 1e-10, EVERYTHING),
    *(_sknetwork_peer(solver, strict) for solver, strict in SIX.items()),
    Peer(
        *("graphblas-algorithms", "graphblas_algorithms", _graphblas_graph, _graphblas, as_scores, _per_node, 1e-10),
        claims=EVERYTHING,
    ),
]
