"""The start of :func:`pagerank` without a given start is nearer to the ranks than the teleport vector."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given

from pdlcheck.checks.graphs import graphs
from pdlcheck.primitives.pagerank import Graph, pagerank
from pdlcheck.primitives.pagerank.datasets import rmat, uniform
from pdlcheck.primitives.pagerank.even_flow import Sums, even_flow

pytestmark = pytest.mark.verifies("pagerank")


def begun(graph: Graph, damping: float, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    in_degree = np.bincount(graph.dst, minlength=graph.num_nodes).astype(np.float64)
    sums = [Sums(vector.sum(), vector[graph.dangling].sum()) for vector in (v, w, in_degree)]
    carried, landed = even_flow(damping, *sums)
    return (1 - damping) * v + carried * in_degree + landed * w


@given(graph=graphs(Graph.from_edges))
def test_it_sums_to_1_and_all_edges_carry_the_same(graph):
    assume(graph.num_edges > 0)
    rng = np.random.default_rng(graph.num_edges)
    v, w = rng.dirichlet(np.ones(graph.num_nodes), 2)
    for damping in (0.0, 0.5, 0.85, 0.99):
        x = begun(graph, damping, v, w)
        assert abs(x.sum() - 1) < 1e-12
        assert x.min() >= 0
        in_degree = np.bincount(graph.dst, minlength=graph.num_nodes)
        moved = x - (1 - damping) * v - damping * x[graph.dangling].sum() * w
        assert np.allclose(moved * in_degree.sum(), moved.sum() * in_degree, atol=1e-9)


def test_where_every_edge_does_carry_the_same_it_is_the_answer():
    """Three rings pass through all nodes, so each node sends one edge in three to each of its successors."""
    n, rng = 1000, np.random.default_rng(0)
    rings = [rng.permutation(n) for _ in range(3)]
    graph = Graph(np.concatenate(rings), np.concatenate([np.roll(ring, 1) for ring in rings]), n)
    found = begun(graph, 0.85, np.full(n, 1 / n), np.full(n, 1 / n))
    assert np.abs(found - pagerank(graph, tol=1e-13).scores).sum() < 1e-12


@pytest.mark.parametrize(
    ("graph", "saved"),
    [(rmat(15, 1_100_000), 2), (uniform(40_000, 1_100_000), 1), (rmat(10, 15_000), 2)],
    ids=["rmat", "uniform", "small"],
)
def test_it_saves_rounds_where_edges_lead_anywhere(graph, saved):
    """The other side gets the same vector as the caller's, for which in-degrees may mean nothing."""
    from_v = pagerank(graph, tol=1e-6, personalization=np.ones(graph.num_nodes))
    found = pagerank(graph, tol=1e-6)
    assert found.converged
    assert found.iterations + saved <= from_v.iterations
    assert np.abs(found.scores - from_v.scores).sum() < 2e-6
