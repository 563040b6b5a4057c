"""PageRank as a networkx backend: ``nx.pagerank(G, backend="pdlcheck")``.

networkx loads this module through the entry point ``networkx.backends``. It converts a graph once and keeps the result,
so a second call on an unchanged graph reuses its layout. Users may also pass a :class:`Graph`.

Differences from networkx:

- ``tol`` bounds the true error, see :func:`pagerank`.
- Negative or infinite weights and vectors raise ValueError; networkx computes with them.
- A vector that is 0 everywhere raises ZeroDivisionError for ``personalization``, ``nstart`` and ``dangling`` alike.
- A call with ``alpha`` outside [0, 1) is left to networkx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx as nx
import numpy as np

from pdlcheck.primitives.pagerank.arguments import distribution, require_memory
from pdlcheck.primitives.pagerank.graph import Float64, Graph
from pdlcheck.primitives.pagerank.solve import pagerank as solve

__all__ = ["can_run", "convert_from_nx", "convert_to_nx", "google_matrix", "pagerank"]

Vector = Mapping[Any, Any] | None
FINEST = 1e-13  # networkx can stop at a step of exactly 0, but an error bound is never below its rounding


def pagerank(
    G: Graph,
    alpha: float = 0.85,
    personalization: Vector = None,
    max_iter: int = 100,
    tol: float = 1e-6,
    nstart: Vector = None,
    weight: Any = "weight",
    dangling: Vector = None,
) -> dict[Any, float]:
    """Return the scores for a converted graph, with the arguments and the result of :func:`networkx.pagerank`.

    The target is a true L1 error of ``tol``. networkx stops when a step is shorter than ``len(G) * tol``, which bounds
    the error by ``len(G) * tol * alpha / (1 - alpha)``. If ``max_iter`` rounds or float64 do not reach ``tol``, the
    larger of that bound and ``len(G) * tol`` is accepted. ``weight`` was read when the graph was converted; ``None``
    counts every edge once.

    Raises:
        networkx.PowerIterationFailedConvergence: after ``max_iter`` rounds the error may still be larger.
        ZeroDivisionError: a vector is 0 on every node.
        ValueError: a value is negative, infinite or NaN.
    """
    if G.num_nodes == 0:
        return {}
    if max_iter < 1 or not tol > 0:
        raise nx.PowerIterationFailedConvergence(max_iter)
    graph = G if weight is not None or G.weights is None else Graph(G.src, G.dst, G.num_nodes, names=G.names)
    enough = max(max(1.0, alpha / (1 - alpha)) * graph.num_nodes * tol, FINEST)
    start = _per_node(graph, "nstart", nstart)
    # on a few graphs, networkx's own iteration over all edges, from its own start, needs fewer rounds
    uniform = np.full(graph.num_nodes, 1 / graph.num_nodes)
    own_rounds = {"kernel": "csr", "start": uniform if start is None else start}
    for way in ({"start": start}, own_rounds):
        result = solve(
            graph,
            damping=alpha,
            tol=min(tol, 2.0),
            max_iter=max_iter,
            personalization=_per_node(graph, "personalization", personalization),
            dangling=_per_node(graph, "dangling", dangling),
            **way,
        )
        if result.error_bound <= enough:
            break
    else:
        raise nx.PowerIterationFailedConvergence(max_iter)
    return dict(zip(_nodes(graph), result.scores.tolist(), strict=True))


def google_matrix(
    G: Graph,
    alpha: float = 0.85,
    personalization: Vector = None,
    nodelist: Any = None,
    weight: Any = "weight",
    dangling: Vector = None,
) -> Float64:
    """Return the matrix of :func:`networkx.google_matrix`, which has the same arguments.

    Row i is the distribution of node i's score over the nodes.
    """
    graph = G if weight is not None or G.weights is None else Graph(G.src, G.dst, G.num_nodes, names=G.names)
    n = graph.num_nodes
    require_memory("google_matrix", 16 * n * n)
    teleport = distribution("personalization", _per_node(graph, "personalization", personalization), graph)
    landing = teleport if dangling is None else distribution("dangling", _per_node(graph, "dangling", dangling), graph)
    matrix = np.zeros((n, n))
    np.add.at(matrix, (graph.src, graph.dst), graph.probabilities)
    matrix[graph.dangling] = landing
    matrix = alpha * matrix + (1 - alpha) * teleport
    if nodelist is None:
        return matrix
    index = {node: i for i, node in enumerate(_nodes(graph))}
    order = [index[node] for node in nodelist]
    return matrix[np.ix_(order, order)]


def can_run(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool | str:
    """Return True, or the reason why networkx should use another backend."""
    given = dict(zip(("G", "alpha"), args, strict=False)) | dict(kwargs)
    alpha = given.get("alpha", 0.85)
    if not 0 <= alpha < 1:
        return f"alpha must be in [0, 1), got {alpha}"
    nodelist = args[3] if len(args) > 3 else kwargs.get("nodelist")
    if name == "google_matrix" and nodelist is not None and set(nodelist) != _set_of_nodes(given["G"]):
        return "nodelist must hold each node once"
    if callable(given.get("weight")):
        return "weight must be the name of an edge attribute, not a function"
    return True


def convert_from_nx(
    graph: Any,
    *,
    edge_attrs: Mapping[Any, Any] | None = None,
    node_attrs: Any = None,
    preserve_edge_attrs: bool = False,
    preserve_node_attrs: bool = False,
    preserve_graph_attrs: bool = False,
    name: str | None = None,
    graph_name: str | None = None,
) -> Graph:
    """Return a networkx graph as a :class:`Graph`, with the one edge attribute that the call of ``name`` reads."""
    if isinstance(graph, Graph):
        return graph
    if preserve_edge_attrs or node_attrs or len(edge_attrs or ()) > 1:
        raise NotImplementedError("a Graph of pdlcheck keeps one edge attribute and no node attributes")
    return Graph.from_networkx(graph, weight=next(iter(edge_attrs), None) if edge_attrs else None)


def convert_to_nx(obj: Any, *, name: str | None = None) -> Any:
    """Return a :class:`Graph` as a MultiDiGraph with its weights; return any other object unchanged."""
    if not isinstance(obj, Graph):
        return obj
    graph: nx.MultiDiGraph[Any] = nx.MultiDiGraph()
    nodes = _nodes(obj)
    graph.add_nodes_from(nodes)
    ends = [[nodes[i] for i in ids.tolist()] for ids in (obj.src, obj.dst)]
    if obj.weights is None:
        graph.add_edges_from(zip(*ends, strict=True))
    else:
        graph.add_weighted_edges_from(zip(*ends, obj.weights.tolist(), strict=True))
    return graph


def _nodes(graph: Graph) -> Any:
    return range(graph.num_nodes) if graph.names is None else graph.names


def _set_of_nodes(graph: Any) -> set[Any]:
    return set(_nodes(graph) if isinstance(graph, Graph) else graph)


def _per_node(graph: Graph, name: str, values: Vector) -> Float64 | None:
    """Return ``values`` as networkx reads them: 0 for a missing node; keys that are no nodes are ignored."""
    if values is None:
        return None
    vector = np.array([values.get(node, 0) for node in _nodes(graph)], np.float64)
    if not vector.any():
        raise ZeroDivisionError(f"{name} is 0 on every node; give at least one a positive value")
    return vector
