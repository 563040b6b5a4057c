"""Many personalised PageRanks at once: each equals the dense solution, and has its own bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks.graphs import graphs
from pdlcheck.checks.pagerank.scores import check_error_bound
from pdlcheck.primitives.pagerank import Graph, pagerank

pytestmark = pytest.mark.verifies("pagerank_many")


def check_each(function, graph, vectors, dangling=None, **arguments):
    results = function(graph, vectors, dangling=dangling, **arguments)
    assert len(results) == len(vectors)
    landing = None if dangling is None else np.asarray(dangling, float)
    for vector, result in zip(vectors, results, strict=True):
        own = {"personalization": vector, "dangling": landing, "tol": arguments.get("tol", 1e-8)}
        check_error_bound(lambda _, result=result: result, graph, **own)
        assert result.converged
    return results


@given(graph=graphs(Graph.from_edges).filter(lambda g: g.num_nodes > 0), data=st.data())
def test_each_vector_keeps_its_bound(subject, graph, data):
    vector = st.lists(st.integers(0, 5), min_size=graph.num_nodes, max_size=graph.num_nodes).filter(any)
    vectors = data.draw(st.lists(st.none() | vector.map(np.array), max_size=20))
    dangling = data.draw(st.none() | vector.map(np.array))
    check_each(subject, graph, vectors, dangling)


@pytest.mark.slow
@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**32),
    num_nodes=st.integers(300, 700),
    tol=st.sampled_from([1e-5, 1e-8, 1e-11]),
    weighted=st.booleans(),
    apart=st.booleans(),
)
def test_each_vector_keeps_its_bound_on_graphs_of_several_blocks(subject, seed, num_nodes, tol, weighted, apart):
    rng = np.random.default_rng(seed)
    src = rng.integers(0, num_nodes * 9 // 10, 1_200_000)
    dst = (num_nodes * rng.random(len(src)) ** 2).astype(np.int64)
    graph = Graph(src, dst, num_nodes, rng.random(len(src)) if weighted else None)
    vectors = [*np.eye(num_nodes)[:3], rng.random(num_nodes)]
    check_each(subject, graph, vectors, rng.random(num_nodes) if apart else None, tol=tol)


def test_a_vector_of_many_has_the_scores_that_it_has_alone(subject):
    graph = Graph.from_edges([0, 0, 1, 2, 4], [1, 2, 2, 0, 4], 6)
    vectors = [{0: 1}, {5: 2, 1: 1}, None, *np.eye(6)] * 4
    for vector, result in zip(vectors, subject(graph, vectors, tol=1e-12), strict=True):
        assert np.abs(result.scores - pagerank(graph, personalization=vector, tol=1e-12).scores).sum() < 2e-12


def test_no_vectors_no_nodes_and_no_edges(subject):
    assert subject(([0], [1]), []) == []
    assert [result.scores.tolist() for result in subject(Graph.from_edges([], [], 0), [None])] == [[]]
    (result,) = subject(Graph.from_edges([], [], 2), [[1, 3]])
    assert np.allclose(result.scores, [0.25, 0.75], atol=1e-8)


def test_too_few_rounds_are_reported_for_each_vector(subject):
    graph = Graph(np.arange(99), np.arange(1, 100), 100)
    for k, result in enumerate(subject(graph, np.eye(100)[[0, 99]], max_iter=2)):
        check_error_bound(lambda _, result=result: result, graph, personalization=np.eye(100)[[0, 99][k]])


@pytest.mark.beyond_contract("error messages")
def test_a_bad_vector_is_named_by_its_place(subject):
    with pytest.raises(ValueError, match=r"personalizations\[1\] holds -1.0 at 0"):
        subject(([0], [1]), [[1, 0], [-1, 2]])
    with pytest.raises(ValueError, match="tol must be a positive number"):
        subject(([0], [1]), [None], tol=0)
