"""Nodes upstream of all cycles, whose scores :func:`pagerank` computes without a round."""

from __future__ import annotations

import math
import tracemalloc
from functools import partial

import numpy as np
import pytest

from pdlcheck.checks.pagerank.scores import check_error_bound, check_pagerank
from pdlcheck.primitives.pagerank import Graph, layout, pagerank, pagerank_many
from pdlcheck.primitives.pagerank.datasets import debian_dependencies
from pdlcheck.primitives.pagerank.memory import solver_nbytes

pytestmark = pytest.mark.verifies("pagerank")


def path() -> Graph:
    """Return a path, in which each node is upstream of the next one."""
    return Graph(np.arange(5), np.arange(1, 6), 6)


def star() -> Graph:
    """Return a star, in which many edges from upstream nodes enter one row."""
    return Graph(np.append(np.arange(1, 700), 0), np.append(np.zeros(699, np.int64), 1), 701)


def layered(num_nodes: int, num_edges: int, *, weighted: bool, seed: int = 0) -> Graph:
    """Return a graph whose upper half has four layers, above a lower half with cycles and sinks.

    Edges of a layer lead to the layers below and to the lower half.
    """
    draw = np.random.default_rng(seed)
    src = draw.integers(num_nodes // 20, num_nodes, num_edges)
    below = np.maximum(src * 8 // num_nodes, 4) * num_nodes // 8
    weights = draw.random(num_edges) * (draw.random(num_edges) < 0.9) if weighted else None
    return Graph(src, (draw.random(num_edges) * below).astype(np.int64), num_nodes, weights)


SMALL = {
    "path": path(),
    "star": star(),
    "to sinks": Graph(np.arange(40), 40 + np.arange(40) % 7, 60),
    "cycle below": Graph(np.array([0, 1, 2, 3, 4, 5]), np.array([1, 2, 3, 2, 3, 4]), 6),
    "drawn": layered(900, 2500, weighted=False),
    "weighted": layered(900, 2500, weighted=True),
}
METHODS = ["gauss-seidel", "power"]


def vectors(graph: Graph) -> dict[str, dict[str, np.ndarray | None]]:
    draw = np.random.default_rng(1)
    one, other = draw.random(graph.num_nodes), draw.random(graph.num_nodes) * (draw.random(graph.num_nodes) < 0.5)
    other[0] = 1
    return {
        "uniform": {},
        "personalization": {"personalization": one},
        "both": {"personalization": one, "dangling": other},
        "upstream alone": {"personalization": _upstream(graph).astype(float)},
    }


def _upstream(graph: Graph) -> np.ndarray:
    made = layout.layout_of(graph)
    return made.row >= made.end_of_blocks


@pytest.mark.parametrize("vector", ["uniform", "personalization", "both", "upstream alone"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SMALL)
def test_scores_are_those_of_the_dense_solution(name, method, vector):
    graph = SMALL[name]
    given = vectors(graph)[vector]
    for tol in (1e-6, 1e-12):
        subject = partial(pagerank, method=method, tol=tol, **given)
        check_pagerank(subject, graph, tol=tol, **given)
        check_error_bound(subject, graph, tol=tol, reachable=True, **given)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_in_many_blocks_and_two_precisions(weighted):
    graph = layered(3000, 2_400_000, weighted=weighted)
    assert layout.layout_of(graph).sink_block > 1
    assert _upstream(graph).any()
    for given in vectors(graph).values():
        check_error_bound(partial(pagerank, tol=1e-11, **given), graph, tol=1e-11, reachable=True, **given)


@pytest.mark.parametrize("num_edges", [6000, 2_400_000], ids=["one block", "many"])
def test_many_vectors_have_the_scores_of_each(num_edges):
    graph = layered(3000, num_edges, weighted=False)
    given = [vector["personalization"] for vector in vectors(graph).values() if vector]
    lands = vectors(graph)["both"]["dangling"]
    for found, one in zip(pagerank_many(graph, given, dangling=lands, tol=1e-10), given, strict=True):
        alone = pagerank(graph, personalization=one, dangling=lands, tol=1e-10)
        assert found.converged
        assert np.abs(found.scores - alone.scores).sum() <= 2e-10


def test_ranks_start_anywhere():
    graph = SMALL["drawn"]
    check_error_bound(partial(pagerank, start={7: 1}), graph, reachable=True)


def test_the_levels_are_those_without_in_edges_from_elsewhere():
    src, dst = np.array([0, 1, 2, 3, 4, 5, 6]), np.array([2, 2, 3, 4, 5, 3, 5])  # 3, 4 and 5 are a cycle
    found = np.flatnonzero(_upstream(Graph(src, dst, 8))).tolist()
    assert found == [0, 1, 2, 6]  # 7 has no edge, so it is dangling


def test_few_are_rows_like_others():
    ring = np.arange(100)
    assert _upstream(Graph(np.append(ring, [100]), np.append(np.roll(ring, 1), [0]), 101)).sum() == 0
    ends = np.append(ring, np.arange(100, 120)), np.append(np.roll(ring, 1), np.zeros(20, np.int64))
    assert _upstream(Graph(*ends, 120)).sum() == 20


def test_a_graph_of_dependencies_has_few_edges_left_for_the_rounds():
    graph = debian_dependencies()
    made = layout.layout_of(graph)
    assert len(made.sources) < graph.num_edges / 3
    assert made.upstream is not None
    assert len(made.upstream.sources) > graph.num_edges * 2 / 3


def test_a_long_way_upstream_takes_no_rounds():
    """The rows of upstream nodes are exact at once."""
    levels = 9
    chain = Graph(np.arange(levels), np.append(np.arange(1, levels), levels), levels + 1)
    assert pagerank(chain, tol=1e-12, method="power").iterations <= 10


def test_what_long_sums_lose_is_bounded():
    """Rows 0 and 1 each sum 100 000 numbers of very different sizes."""
    draw = np.random.default_rng(0)
    size = 200_000
    graph = Graph(np.arange(2, size), np.arange(2, size) % 2, size)
    made = layout.layout_of(graph)
    vector = np.append(np.zeros(made.end_of_blocks), draw.random(size - 2) ** 20)
    found, lost = made.upstream.taken_in(vector, 0.85)
    error = 0.0
    for node in (0, 1):
        exact = 0.85 * math.fsum(vector[made.row[node + 2 :: 2]])
        error += abs(found[made.row[node]] - exact)
    assert 0 < error <= lost < 1e-12 * found.sum()


def test_the_solver_takes_no_more_memory_than_was_said():
    """The solver holds the vectors with the flow of upstream nodes beside the given vectors."""
    graph, given = layered(300_000, 300_000, weighted=False), np.linspace(1, 2, 300_000)
    pagerank(SMALL["drawn"], personalization={0: 1}, dangling={1: 1})  # compiles the kernels
    tracemalloc.start()
    try:
        pagerank(graph, personalization=given, dangling=given[::-1], tol=1e-10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    said = solver_nbytes(graph.num_nodes, graph.num_edges)
    assert said / 2 < peak < said
