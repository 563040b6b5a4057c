"""PageRank on real input: the dependencies among the packages of Debian 12."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from pdlcheck.checks.pagerank.scores import check_pagerank, check_pagerank_agreement
from pdlcheck.extras import MissingExtra
from pdlcheck.primitives.pagerank import (
    Graph,
    debian_dependencies,
    pagerank,
    pagerank_v0,
    pagerank_v1,
    pagerank_v2,
    pagerank_v3,
)
from pdlcheck.report.records import Agreement, PackageRanking

__all__ = ["rank_packages"]

TOL = 1e-11  # float64 cannot guarantee 1e-12 on this graph
DENSE_NODES = 2000  # a dense matrix takes num_nodes**2 * 8 bytes: 32 MB here, 32 GB for all packages
SPARSE: dict[str, Callable[[Any], Any]] = {"v0": pagerank_v0, "v1": pagerank_v1}
DENSE: dict[str, Callable[[Any], Any]] = {"v2": pagerank_v2, "v3": pagerank_v3}


def rank_packages(count: int = 10) -> PackageRanking:
    """Rank all packages, and compare the versions of PageRank.

    The sparse versions are compared on all packages, all versions on the best ``DENSE_NODES``.

    Args:
        count: how many of the best packages to return.
    """
    start = time.perf_counter()
    graph = debian_dependencies()
    result = pagerank(graph, tol=TOL)
    sparse, missing = dict(SPARSE), []
    try:
        pagerank_v0(([0, 1], [1, 0]), iterations=1)
    except MissingExtra as error:
        del sparse["v0"]
        missing.append(str(error))
    solver = partial(pagerank, tol=TOL)
    best = _among_the_best(graph, result.scores, DENSE_NODES)
    agreements = (
        _agreement("all packages", graph, {**sparse, "pagerank": solver}),
        _agreement(f"the {DENSE_NODES} best", best, {**sparse, **DENSE, "pagerank": solver}),
    )
    return PackageRanking(
        tuple((str(name), score) for name, score in result.top(count)),
        result.iterations,
        result.error_bound,
        agreements,
        tuple(missing),
        time.perf_counter() - start,
    )


def _among_the_best(graph: Graph, scores: Any, count: int) -> Graph:
    """Return the graph of the ``count`` best nodes, renumbered, with the edges among them."""
    kept = np.sort(np.argsort(-scores, kind="stable")[:count])
    new = np.full(graph.num_nodes, -1)
    new[kept] = np.arange(len(kept))
    inside = (new[graph.src] >= 0) & (new[graph.dst] >= 0)
    return Graph(new[graph.src[inside]], new[graph.dst[inside]], len(kept))


def _agreement(name: str, graph: Graph, versions: Mapping[str, Callable[[Any], Any]]) -> Agreement:
    """Check that each version computes the PageRank of ``graph``, and that any two versions agree."""
    difference, failure = None, ""
    known: dict[str, Any] = {}

    def once(version: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def scores(graph: Any) -> Any:
            if version not in known:
                known[version] = function(graph)
            return known[version]

        scores.__name__ = version
        return scores

    functions = {version: once(version, function) for version, function in versions.items()}
    try:
        for function in functions.values():
            check_pagerank(function, graph, tol=TOL)
        difference = check_pagerank_agreement(functions, graph, tol=TOL)
    except AssertionError as error:
        failure = str(error)
    return Agreement(name, graph.num_nodes, graph.num_edges, tuple(versions), difference, failure)
