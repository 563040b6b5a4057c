"""The solvers and versions of pdlcheck as rows of the same tables."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pdlcheck.checks.graphs import Edges
from pdlcheck.primitives import pagerank as ours
from pdlcheck.primitives.pagerank import Graph, PageRankResult, pagerank
from pdlcheck.primitives.pagerank.layout import layout_of
from ranking.peer import Peer, Question, Setting

__all__ = ["GUARANTEED", "METHODS", "PUBLISHED", "TUNED", "rounds"]

ALL = frozenset({"weights", "personalization", "dangling weights"})


def _graph(edges: Edges) -> Graph:
    return Graph(edges.src, edges.dst, edges.num_nodes, edges.weights)


def _laid_out(edges: Edges) -> Graph:
    """Return the graph with the layout that a first call makes."""
    graph = _graph(edges)
    layout_of(graph)
    return graph


def _pagerank(graph: Graph, question: Question, setting: Setting, method: Any = "auto") -> PageRankResult:
    tol = 1e-8 if setting is None else float(setting)
    vectors = {"personalization": question.personalization, "dangling": question.dangling}
    return pagerank(graph, damping=question.damping, tol=tol, method=method, **vectors)


def _scores(edges: Edges, result: PageRankResult) -> Any:
    return result.scores


def _version(name: str, graph: Graph, question: Question, setting: Setting) -> Any:
    return getattr(ours, name)(graph, damping=question.damping, iterations=rounds(question.damping)).numpy()


def rounds(damping: float) -> int:
    """Return the rounds of a published version: the error is at most ``2 * damping**rounds``, here below 1e-8."""
    return 2 if damping == 0 else 1 + math.ceil(math.log(0.5e-8) / math.log(damping))


GUARANTEED = Peer("pdlcheck", "pdlcheck", _laid_out, _pagerank, _scores, claims=ALL, guarantees=True)
TUNED = Peer("pdlcheck, tol tuned", "pdlcheck", _laid_out, _pagerank, _scores, claims=ALL)
METHODS = [
    Peer(f"pdlcheck {method}", "pdlcheck", _graph, partial(_pagerank, method=method), _scores, strict=1e-8, claims=ALL)
    for method in ("auto", "power", "gauss-seidel")
]
PUBLISHED = [
    Peer(
        f"pdlcheck {name[9:]}",
        "dgl" if name == "pagerank_v0" else "pdlcheck",
        _graph,
        partial(_version, name),
        claims=frozenset({"weights"}),
    )
    for name in ("pagerank_v0", "pagerank_v1", "pagerank_v2", "pagerank_v3")
]
