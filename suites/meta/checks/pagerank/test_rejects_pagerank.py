"""check_pagerank rejects broken PageRanks, names the cause, and accepts the correct twin on the same graph."""

from __future__ import annotations

from functools import partial

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from pdlcheck.checks.graphs import CORNERS, Edges, graphs
from pdlcheck.checks.pagerank.oracle import Oracle
from pdlcheck.checks.pagerank.scores import check_pagerank

from .pagerank_by_hand import (
    DANGLING,
    ISOLATED,
    LOOPS,
    ONE,
    PLAIN,
    REPEATED,
    WEIGHTED,
    D,
    edges,
    matrix,
    only_connected,
    power,
    twin,
)

BROKEN = {
    # pr-dangling-dropped, and its neighbour
    "dangling mass dropped": (
        partial(twin, drop_dangling=True),
        DANGLING,
        "likely cause +dangling mass dropped",
    ),
    "dangling mass stays": (partial(twin, dangling_stays=True), DANGLING, "dangling nodes keep their mass"),
    # pr-init-not-distribution
    "ranks start at 1": (partial(twin, start=1), PLAIN, "every score is num_nodes=4 times the right one"),
    # pr-wrong-n
    "n of the connected part": (
        partial(twin, teleport_nodes=only_connected),
        ISOLATED,
        r"likely cause +(the sum is above 1|every score)",
    ),
    "n is off by one": (
        partial(twin, teleport_nodes=lambda g: g.num_nodes + 1),
        PLAIN,
        r"\(1 - d\)/n is 0.0375: a wrong n|not normalised",
    ),
    # pr-isolated-node
    "a single node gets 1 - d": (
        partial(twin, leaf=1 - D),
        ONE,
        "node 0 holds 0.15, the dense solution is 1",
    ),
    # pr-max-iter-no-convergence
    "three rounds": (
        partial(twin, rounds=3),
        PLAIN,
        "stopped too early: these are the scores after 3 rounds",
    ),
    "thirty rounds": (
        partial(twin, rounds=30),
        PLAIN,
        "stopped too early: these are the scores after 30 rounds",
    ),
    # pr-duplicate-edges
    "repeated edges collapsed": (
        partial(twin, repeated="collapsed"),
        REPEATED,
        "repeated edges collapsed into one",
    ),
    "in the sum only": (
        partial(twin, repeated="collapsed in sum"),
        REPEATED,
        "collapsed in the sum, but counted in the out-degree",
    ),
    "in the degree only": (
        partial(twin, rounds=5, repeated="collapsed in degree"),
        REPEATED,
        "likely cause +no known cause fits; .*; note: the sum is above 1",
    ),
    # pr-transposed
    "transposed": (
        partial(twin, transposed=True),
        PLAIN,
        "matrix transposed, the ranks of the reversed graph",
    ),
    "in-degree for out-degree": (
        partial(twin, in_degree=True),
        PLAIN,
        "divided by the in-degree, not the out-degree",
    ),
    # pr-self-loop
    "self-loops dropped from the sum": (
        partial(twin, self_loops="dropped from sum"),
        LOOPS,
        "self-loops left out of the sum, but counted",
    ),
    "self-loops dropped": (
        partial(twin, self_loops="dropped"),
        LOOPS,
        "self-loops left out: the scores are exactly",
    ),
    # others
    "weights ignored": (partial(twin, weighted=False), WEIGHTED, "edge weights ignored"),
    "not divided": (partial(twin, no_division=True), PLAIN, "the sum grows round by round: not divided"),
    "rows sum to 1": (lambda g: power(matrix(g).T), PLAIN, "transition matrix transposed, its rows sum to 1"),
    "adjacency transposed": (
        lambda g: power(matrix(edges(g.dst, g.src, g.num_nodes), degree_of=g)),
        PLAIN,
        "adjacency transposed, but not the out-degrees",
    ),
    "damping for 1 - damping": (partial(twin, swap_damping=True), PLAIN, "damping taken for 1 - damping"),
    "not normalised": (lambda g: 3 * twin(g), PLAIN, "every score is 3 times the right one"),
    "NaN": (lambda g: twin(g) * np.nan, PLAIN, "likely cause +not finite"),
    "one score missing": (
        lambda g: twin(g)[1:],
        PLAIN,
        r"the scores have shape \(3,\), expected one per node, \(4,\)",
    ),
    "a dict without a node": (lambda g: {0: 1.0}, PLAIN, "no score for node 1, one of 3 without"),
}


@pytest.mark.parametrize("bug", BROKEN)
def test_check_pagerank_rejects(bug):
    broken, graph, message = BROKEN[bug]
    check_pagerank(twin, graph, tol=1e-12)
    with pytest.raises(AssertionError, match=message) as caught:
        check_pagerank(broken, graph, tol=1e-8)
    if "score" not in message[:14] and "shape" not in message:
        assert f"num_nodes={graph.num_nodes} num_edges={len(graph.src)} damping=0.85" in str(caught.value)


@pytest.mark.parametrize("bug", [bug for bug in BROKEN if bug != "a dict without a node"])
def test_drawn_graphs_reveal(bug):
    """The strategy reaches each mistake by itself within 500 examples, and shrinks the graph to a few nodes."""
    broken = BROKEN[bug][0]

    def fails(graph: Edges) -> bool:
        try:
            with np.errstate(all="ignore"):
                check_pagerank(broken, graph, tol=1e-8)
        except AssertionError:
            return True
        return False

    quick = settings(
        max_examples=500, database=None, derandomize=True, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    assert find(graphs(max_nodes=6, max_edges=10), fails, settings=quick).num_nodes <= 3


def either_way(graph, loops_once):
    """Return the graph with every edge in both directions."""
    back = graph.src != graph.dst if loops_once else slice(None)
    src, dst = np.r_[graph.src, graph.dst[back]], np.r_[graph.dst, graph.src[back]]
    return Edges(src, dst, graph.num_nodes, np.r_[graph.weights, graph.weights[back]])


def scaled_every_round(graph):
    oracle, scores = Oracle.of(graph, D), np.full(graph.num_nodes, 1 / graph.num_nodes)
    for _ in range(400):
        scores = (1 - D) * oracle.teleport + D * oracle.matrix() @ scores
        scores /= scores.sum()
    return scores


def shares_of_sums(graph, *, raw_sum, raw_degree):
    """Return scores in which weights count only in the sum, or only in the out-degree.

    The graph has no dangling nodes, so that their mass is left out.
    """
    ones = np.ones(len(graph.src))
    dense = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(dense, (graph.dst, graph.src), graph.weights if raw_sum else ones)
    return power(dense / np.bincount(graph.src, graph.weights if raw_degree else ones, graph.num_nodes))


MISTAKES_WITH_WEIGHTS = {
    "matrix transposed, the ranks of the reversed graph": partial(twin, transposed=True),
    "edges taken as undirected": lambda g: twin(either_way(g, False)),
    "edges taken as undirected: the scores are exactly": lambda g: twin(either_way(g, True)),
    "self-loops left out: the scores are exactly": partial(twin, self_loops="dropped"),
    "edge weights ignored: the scores are exactly": partial(twin, weighted=False),
    "ignored in the sum, but counted in the out-weight": partial(shares_of_sums, raw_sum=False, raw_degree=True),
    "ignored in the out-weight, but counted in the sum": partial(shares_of_sums, raw_sum=True, raw_degree=False),
    "damping 0.9, not 0.85: the scores are exactly": partial(twin, damping=0.9),
    "the first edge is left out": lambda g: twin(Edges(g.src[1:], g.dst[1:], g.num_nodes, g.weights[1:])),
    "the last edge is left out": lambda g: twin(Edges(g.src[:-1], g.dst[:-1], g.num_nodes, g.weights[:-1])),
}


@pytest.mark.parametrize("cause", MISTAKES_WITH_WEIGHTS)
@pytest.mark.parametrize("unit", [1.0, 7.5])
def test_a_mistake_is_named_whatever_the_unit_of_the_weights(cause, unit):
    rng = np.random.default_rng(0)
    src = np.r_[3, np.tile(np.arange(8), 3), 5]
    dst = np.r_[4, rng.integers(0, 8, 22), 5, 6, 1]
    graph = Edges(src, dst, 8, unit * rng.uniform(1, 9, len(src)))
    check_pagerank(twin, graph, tol=1e-12)
    with pytest.raises(AssertionError, match=cause), np.errstate(all="ignore"):
        check_pagerank(MISTAKES_WITH_WEIGHTS[cause], graph)


def test_scores_that_are_scaled_every_round_are_named():
    check_pagerank(twin, DANGLING)
    with pytest.raises(AssertionError, match="dangling mass dropped, the scores scaled to sum 1 every round"):
        check_pagerank(scaled_every_round, DANGLING)


def test_mistakes_on_large_graphs_are_named():
    rng = np.random.default_rng(0)
    graph = edges(rng.integers(0, 5000, 30_000), rng.integers(0, 5000, 30_000), 5000)
    check_pagerank(twin, graph)
    for broken, cause in (({"damping": 0.8}, "damping 0.8, not 0.85"), ({"rounds": 6}, "scores after 6 rounds")):
        with pytest.raises(AssertionError, match=cause):
            check_pagerank(partial(twin, **broken), graph)


@pytest.mark.parametrize("value", [1e308, 5e-324])
@pytest.mark.parametrize("vector", ["personalization", "dangling"])
def test_vectors_of_any_magnitude_are_accepted(vector, value):
    check_pagerank(twin, DANGLING, **{vector: np.full(3, value)})  # uniform, as the twin has it
    with pytest.raises(AssertionError, match=r"ignored|not its own|spread uniformly"):
        check_pagerank(twin, DANGLING, **{vector: [value, 0, 0]})


@pytest.mark.parametrize("vector", ["personalization", "dangling"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 0, 0], "is 0 everywhere"),
        ([1, -1, 1], "holds -1.0 at 1"),
        ([1, 1, np.nan], "holds nan at 2"),
        ([1, 1], r"shape \(3,\), got shape \(2,\)"),
        ({0: 1}, "one number per node, got a dict"),
    ],
)
def test_a_vector_that_is_none_is_refused_and_no_function_blamed(vector, values, message):
    with pytest.raises(ValueError, match=f"^{vector} .*{message}"):
        check_pagerank(twin, DANGLING, **{vector: values})


@pytest.mark.parametrize("wrong", [{"damping": 1}, {"damping": np.nan}, {"tol": -1}, {"tol": np.nan}, {"tol": "1e-8"}])
def test_a_wrong_number_is_refused_and_no_function_blamed(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be a number"):
        check_pagerank(twin, PLAIN, **wrong)


def test_a_graph_of_another_library_is_refused_with_what_reads_it():
    with pytest.raises(TypeError, match=r"^graph must have src, dst, num_nodes and weights, got a DiGraph; .*as_graph"):
        check_pagerank(twin, nx.DiGraph([(0, 1)]))


def test_complex_scores_are_right_only_where_they_are_real():
    check_pagerank(lambda g: twin(g) + 0j, PLAIN)  # as numpy.linalg.eig returns them
    with pytest.raises(AssertionError, match=r"node 2 holds .*j, a score is a real number"):
        check_pagerank(lambda g: twin(g) + np.array([0, 0, 1j, 0]), PLAIN)


def test_scores_with_something_beside_them_are_rejected():
    with pytest.raises(AssertionError, match="returned a tuple, expected one score per node"):
        check_pagerank(lambda g: (twin(g), 40), PLAIN)


def test_the_message_names_the_node_its_in_edges_the_sum_and_the_case():
    with pytest.raises(AssertionError) as caught:
        check_pagerank(partial(twin, drop_dangling=True), DANGLING)
    assert str(caught.value).splitlines() == [
        "twin: node 2 holds 0.1318125, the dense solution is 0.520869350457",
        "  in-edges      0 -> 2, 1 -> 2",
        "  distance      sum |found - expected| = 7.469e-01, allowed 1.0e-08",
        "  sum           0.2530625",
        "  likely cause  dangling mass dropped: the scores are exactly those",
        "  case          num_nodes=3 num_edges=3 damping=0.85 dangling=1 dtype=float64",
        "  edges         0 -> 1, 0 -> 2, 1 -> 2",
    ]


@pytest.mark.parametrize("num_nodes", [2, 5000])
def test_check_pagerank_judges_a_graph_without_edges(num_nodes):
    graph = edges([], [], num_nodes)
    check_pagerank(twin, graph)
    wrong = np.eye(1, num_nodes)[0]
    with pytest.raises(AssertionError, match=r"node \d holds [01], "):
        check_pagerank(lambda _: wrong, graph)


@given(graph=graphs())
def test_the_correct_twin_is_accepted_on_drawn_graphs(graph):
    check_pagerank(twin, graph, tol=1e-12)


@pytest.mark.parametrize("corner", CORNERS)
def test_the_correct_twin_is_accepted_on_named_graphs(corner):
    with np.errstate(over="ignore", under="ignore"):
        if "1e300" not in corner:  # the twin divides by sums of raw weights
            check_pagerank(twin, CORNERS[corner], tol=1e-12)


@given(graph=graphs(weighted=False))
def test_networkx_is_accepted_with_its_dicts(graph):
    def networkx(graph: Edges) -> dict[int, float]:
        there = nx.MultiDiGraph()
        there.add_nodes_from(range(graph.num_nodes))
        there.add_edges_from(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
        return nx.pagerank(there, tol=1e-14, max_iter=2000)

    check_pagerank(networkx, graph, tol=1e-11)


def test_networkx_with_its_default_tolerance_is_rejected():
    """The rule of networkx, a step below num_nodes * 1e-6, stops too early on a path."""
    path = edges(np.arange(999), np.arange(1, 1000), 1000)
    with pytest.raises(AssertionError, match="stopped too early"):
        check_pagerank(lambda g: nx.pagerank(nx.path_graph(1000, nx.DiGraph)), path, tol=1e-6)
