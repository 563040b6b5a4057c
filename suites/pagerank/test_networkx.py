"""The networkx backend, called as networkx calls it; ``meta/test_networkx_backend.py`` goes through networkx."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.checks.graphs import graphs
from pdlcheck.networkx_info import backend_info
from pdlcheck.primitives.pagerank import Graph, networkx_backend, pagerank_reference

pytestmark = pytest.mark.verifies("pagerank")
WEB = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])


def converted(graph, weight="weight"):
    attributes = None if weight is None else {weight: 1}
    return networkx_backend.convert_from_nx(graph, edge_attrs=attributes, name="pagerank", graph_name="G")


def multigraph(graph):
    there = nx.MultiDiGraph()
    there.add_nodes_from(range(graph.num_nodes))
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights
    there.add_weighted_edges_from(zip(graph.src.tolist(), graph.dst.tolist(), weights.tolist(), strict=True))
    return there


def converges(graph, **arguments):
    try:
        nx.pagerank(graph, **arguments)
    except nx.PowerIterationFailedConvergence:
        return False
    return True


@given(graph=graphs(Graph.from_edges), alpha=st.sampled_from([0.85, 0.5, 0.0, 0.95]))
def test_scores_are_the_dense_solution_within_tol_and_python_floats(graph, alpha):
    found = networkx_backend.pagerank(converted(multigraph(graph)), alpha=alpha, tol=1e-9, max_iter=1000)
    expected = pagerank_reference(graph, damping=alpha)
    assert list(found) == list(range(graph.num_nodes))
    assert all(type(score) is float for score in found.values())
    assert sum(abs(found[i] - expected[i]) for i in found) <= 2e-9


@given(graph=graphs(Graph.from_edges), rounds=st.integers(1, 40), tol=st.sampled_from([1e-3, 1e-6, 1e-10]))
def test_it_converges_where_networkx_does_and_is_as_close_to_the_truth(graph, rounds, tol):
    """The rule of networkx bounds the error by ``N * tol * alpha / (1 - alpha)``; rounding adds far less."""
    there, alpha = multigraph(graph), 0.85
    n = graph.num_nodes
    if not converges(there, alpha=alpha, tol=tol, max_iter=rounds):
        return
    found = networkx_backend.pagerank(converted(there), alpha=alpha, tol=tol, max_iter=rounds)
    expected = pagerank_reference(graph, damping=alpha)
    assert sum(abs(found[i] - expected[i]) for i in found) <= n * tol * alpha / (1 - alpha)


def test_as_few_rounds_as_networkx_takes_on_a_larger_graph_are_enough():
    """The rule of networkx, a step below ``N * tol``, stops some rounds before an error of ``tol`` is reached."""
    there = nx.gnp_random_graph(2000, 0.002, seed=0, directed=True)
    rounds = next(rounds for rounds in range(1, 100) if converges(there, tol=1e-6, max_iter=rounds))
    found = networkx_backend.pagerank(converted(there), tol=1e-6, max_iter=rounds)
    exact = pagerank_reference(converted(there))
    assert 1e-6 < sum(abs(found[i] - exact[i]) for i in found) <= 2000 * 1e-6 * 0.85 / 0.15


@pytest.mark.parametrize("tol", [1e-16, 1e-300])
def test_a_fixed_point_is_one_however_small_tol_is(tol):
    there = nx.cycle_graph(4, create_using=nx.DiGraph)
    assert converges(there, tol=tol, max_iter=100)
    assert networkx_backend.pagerank(converted(there), tol=tol) == pytest.approx(dict.fromkeys(range(4), 0.25))


def test_where_its_own_rounds_are_fewer_they_are_taken():
    """On a path whose end keeps its rank each rescaling moves everything, but powers finish after five rounds."""
    there = nx.DiGraph([(0, 3), (3, 4), (4, 2), (2, 1)])
    arguments = {"personalization": {0: 1}, "dangling": {1: 1}, "tol": 1e-6, "max_iter": 20}
    assert converges(there, **arguments)
    found, expected = networkx_backend.pagerank(converted(there), **arguments), nx.pagerank(there, **arguments)
    assert found == pytest.approx(expected, abs=1e-5)


_EVEN = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)]  # with these vectors all ranks are 1 / 3


@pytest.mark.parametrize(
    ("edges", "personalization"),
    [([(0, 0), (1, 1), (2, 0)], None), (_EVEN, {0: 52, 1: 1, 2: 1})],
)
def test_where_its_own_beginning_is_the_better_one_it_is_taken(edges, personalization):
    """Two rounds from the uniform vector are enough; from in-degrees or the teleport vector they are not."""
    there = nx.DiGraph(edges)
    arguments = {"personalization": personalization, "tol": 1e-3, "max_iter": 2}
    assert converges(there, **arguments)
    found, expected = networkx_backend.pagerank(converted(there), **arguments), nx.pagerank(there, **arguments)
    assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
@given(graph=graphs(Graph.from_edges).filter(lambda g: g.num_nodes > 0), data=st.data())
def test_vectors_are_read_as_networkx_reads_them(graph, data):
    """A vector may omit nodes, and keys that are not nodes do not count."""
    keys = st.integers(0, graph.num_nodes + 1)
    vectors = st.dictionaries(keys, st.integers(0, 5)).filter(lambda v: any(v.get(i) for i in range(graph.num_nodes)))
    names = ("personalization", "dangling", "nstart")
    given_ = {name: data.draw(vectors) for name in names if data.draw(st.booleans())}
    there = multigraph(graph)
    found = networkx_backend.pagerank(converted(there), tol=1e-10, max_iter=1000, **given_)
    expected = nx.pagerank(there, tol=1e-13, max_iter=5000, **given_)
    assert sum(abs(found[i] - expected[i]) for i in found) <= 2e-10


@given(graph=graphs(Graph.from_edges), data=st.data())
def test_the_google_matrix_is_that_of_networkx(graph, data):
    there = multigraph(graph)
    order = data.draw(st.none() | st.permutations(list(there)))
    vector = data.draw(st.none() | st.just({0: 1.0})) if graph.num_nodes else None
    arguments = {"alpha": 0.7, "nodelist": order, "personalization": vector}
    found = networkx_backend.google_matrix(converted(there), **arguments)
    np.testing.assert_allclose(found, nx.google_matrix(there, **arguments), atol=1e-15)


@given(graph=graphs(Graph.from_edges))
def test_a_graph_that_is_converted_back_has_the_same_nodes_and_edges(graph):
    there = multigraph(graph)
    back = networkx_backend.convert_to_nx(converted(there))
    assert list(back) == list(there)
    assert sorted(back.edges(data="weight", default=1)) == sorted(there.edges(data="weight", default=1))
    assert networkx_backend.convert_to_nx({"a": 1}) == {"a": 1}


def test_weight_is_the_attribute_of_the_call_and_none_counts_every_edge_once():
    graph = nx.DiGraph([(0, 1, {"weight": 9, "cost": 1}), (0, 2, {"weight": 1, "cost": 9}), (1, 0), (2, 0)])
    by_weight = networkx_backend.pagerank(converted(graph))
    by_cost = networkx_backend.pagerank(converted(graph, "cost"), weight="cost")
    plain = networkx_backend.pagerank(converted(graph, None), weight=None)
    cached = networkx_backend.pagerank(converted(graph), weight=None)  # networkx may offer one with weights
    assert by_weight[1] == pytest.approx(by_cost[2]) != pytest.approx(by_weight[2])
    assert plain[1] == pytest.approx(plain[2])
    assert cached == plain


def test_nodes_keep_their_names_and_the_empty_graph_is_an_empty_dict():
    assert set(networkx_backend.pagerank(converted(WEB))) == {"a", "b", "c", "d"}
    assert networkx_backend.pagerank(converted(nx.Graph())) == {}


@pytest.mark.parametrize(
    "arguments",
    [{"max_iter": 0}, {"max_iter": -3}, {"tol": 0.0}, {"tol": math.nan}, {"max_iter": 2, "tol": 1e-12}],
    ids=str,
)
def test_what_does_not_converge_raises_the_error_of_networkx(arguments):
    with pytest.raises(nx.PowerIterationFailedConvergence):
        networkx_backend.pagerank(converted(WEB), **arguments)
    with pytest.raises(nx.PowerIterationFailedConvergence):
        nx.pagerank(WEB, **arguments)


def test_any_error_is_allowed_with_an_infinite_tol():
    assert math.fsum(networkx_backend.pagerank(converted(WEB), tol=math.inf).values()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["personalization", "nstart", "dangling"])
@pytest.mark.parametrize("vector", [{"a": 0}, {}, {"elsewhere": 1}], ids=str)
def test_a_vector_of_zeros_is_a_zero_division(name, vector):
    with pytest.raises(ZeroDivisionError, match=f"{name} is 0 on every node"):
        networkx_backend.pagerank(converted(WEB), **{name: vector})


@pytest.mark.parametrize("name", ["personalization", "dangling"])
def test_a_negative_vector_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} holds -1.0 at 0"):
        networkx_backend.pagerank(converted(WEB), **{name: {"a": -1, "b": 3}})


def test_what_it_cannot_run_is_left_to_networkx_with_the_reason():
    can_run = networkx_backend.can_run
    assert can_run("pagerank", (WEB,), {}) is True
    assert can_run("pagerank", (WEB, 0.0), {"weight": None}) is True
    assert can_run("pagerank", (WEB, 1.0), {}) == "alpha must be in [0, 1), got 1.0"
    assert can_run("pagerank", (), {"G": WEB, "alpha": -1}) == "alpha must be in [0, 1), got -1"
    assert "attribute" in can_run("pagerank", (WEB,), {"weight": len})
    assert can_run("google_matrix", (WEB,), {"nodelist": ["a"]}) == "nodelist must hold each node once"
    assert can_run("google_matrix", (WEB,), {"nodelist": list("abcx")}) == "nodelist must hold each node once"
    assert can_run("google_matrix", (WEB, 0.85, None, list("dcba")), {}) is True
    assert can_run("google_matrix", (converted(WEB),), {"nodelist": list("dcba")}) is True


def test_a_conversion_that_would_lose_attributes_is_not_made():
    with pytest.raises(NotImplementedError):
        networkx_backend.convert_from_nx(WEB, preserve_edge_attrs=True)
    with pytest.raises(NotImplementedError):
        networkx_backend.convert_from_nx(WEB, edge_attrs={"a": 1, "b": 1})


def test_the_functions_that_networkx_is_told_of_are_there():
    told = backend_info()["functions"]
    assert set(told) == set(networkx_backend.__all__) - {"can_run", "convert_from_nx", "convert_to_nx"}
