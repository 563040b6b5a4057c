"""The PageRank checks reject broken PageRanks, say why, and accept the correct twin on the same graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from pdlcheck.checks.graphs import CORNERS, Edges, graph_and_relabelling, graphs
from pdlcheck.checks.pagerank import (
    check_error_bound,
    check_pagerank,
    check_pagerank_agreement,
    check_pagerank_relabelling,
    check_transition_matrix,
)
from pdlcheck.checks.pagerank_oracle import Oracle
from pdlcheck.errors import Inconclusive

D = 0.85


def edges(src, dst, num_nodes, weights=None):
    ids = np.array(src, np.int64), np.array(dst, np.int64)
    return Edges(*ids, num_nodes, None if weights is None else np.array(weights, float))


# A correct PageRank in plain numpy, with a switch for each mistake.


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
    """The fixed point of a matrix as it stands, without dangling nodes."""
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
    """Nodes that an edge touches: all that is seen by a reader of edge lists that forgets the others."""
    return len(np.union1d(graph.src, graph.dst))


ISOLATED = edges([0, 1], [1, 0], 3)
PLAIN = edges([0, 0, 1, 2, 3, 3], [1, 2, 2, 0, 0, 2], 4)
DANGLING = edges([0, 0, 1], [1, 2, 2], 3)
LOOPS = edges([0, 0, 1, 2], [0, 1, 2, 0], 3)
REPEATED = edges([0, 0, 0, 1, 2, 3], [1, 1, 2, 0, 0, 1], 4)
WEIGHTED = edges([0, 0, 1, 2, 3], [1, 2, 0, 0, 1], 4, [1, 5, 1, 1, 1])
ONE = edges([], [], 1)

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
        "likely cause +the sum is above 1",
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
    # more
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
    """The strategy reaches each mistake by itself within 500 examples, and shrinks to a handful of nodes."""
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
    """The graph with every edge both ways."""
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
    """Weights are counted in one of the two only; no mass of dangling nodes, of which there are none."""
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
        "  in-edges       0 -> 2, 1 -> 2",
        "  distance       sum |found - expected| = 7.469e-01, allowed 1.0e-08",
        "  sum            0.2530625",
        "  likely cause   dangling mass dropped: the scores are exactly those",
        "  case           num_nodes=3 num_edges=3 damping=0.85 dangling=1 dtype=float64",
        "  edges          0 -> 1, 0 -> 2, 1 -> 2",
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
    """Its rule, a step below num_nodes * 1e-6, stops too early on a path."""
    path = edges(np.arange(999), np.arange(1, 1000), 1000)
    with pytest.raises(AssertionError, match="stopped too early"):
        check_pagerank(lambda g: nx.pagerank(nx.path_graph(1000, nx.DiGraph)), path, tol=1e-6)


# ---- long sums: pr-float32-accumulate


def many_dangling(count=100_000):
    rng = np.random.default_rng(0)
    return edges(rng.integers(0, 1000, 5000), rng.integers(0, count, 5000), count)


def rank_with_sum(graph, add, dtype):
    """The twin with the dangling mass summed by ``add``; scores kept in ``dtype``."""
    n = graph.num_nodes
    degree = np.bincount(graph.src, minlength=n)
    x = np.full(n, 1 / n, dtype)
    for _ in range(150):
        arrived = np.bincount(graph.dst, (x / np.maximum(degree, 1))[graph.src], n)
        x = ((1 - D) / n + D * (arrived + float(add(x[degree == 0])) / n)).astype(dtype)
    return x


def running_sum(values):
    return np.cumsum(values.astype(np.float32))[-1]  # one after the other, in float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_check_pagerank_rejects_one_running_float32_sum(dtype):
    graph = many_dangling()
    check_pagerank(lambda g: rank_with_sum(g, np.sum, dtype), graph, tol=1e-9)
    with pytest.raises(AssertionError, match=r"the sum is (above|below) 1"):
        check_pagerank(lambda g: rank_with_sum(g, running_sum, dtype), graph, tol=1e-9)


def test_check_pagerank_judges_large_graphs_by_one_more_round():
    graph = many_dangling(20_000)
    check_pagerank(twin, graph)
    with pytest.raises(
        AssertionError, match=r"one serial round further is .*\n(.*\n)*  likely cause +the sum is below 1"
    ):
        check_pagerank(partial(twin, drop_dangling=True), graph)
    with pytest.raises(AssertionError, match="one serial round further is"):
        check_pagerank(partial(twin, rounds=3), graph)
    scores = twin(graph)
    scores[[0, 1]] += [1e-9, -2 * scores[1]]
    with pytest.raises(AssertionError, match="node 1"):
        check_pagerank(lambda _: scores, graph, tol=1e-3)


# ---- vectors


@pytest.mark.parametrize(
    ("used", "message"),
    [
        ({"personalization": None, "dangling": [0, 0, 1]}, "personalization ignored"),
        ({"personalization": [1, 0, 0], "dangling": None}, "dangling mass follows the teleport vector"),
        ({"personalization": [1, 0, 0], "dangling": [1, 1, 1]}, "dangling mass spread uniformly"),
    ],
)
def test_check_pagerank_rejects_a_vector_that_is_ignored(used, message):
    graph = nx.DiGraph([(0, 1), (0, 2), (1, 2)])
    right = {"personalization": [1, 0, 0], "dangling": [0, 0, 1]}

    def networkx(_, personalization, dangling):
        as_dict = [v if v is None else dict(enumerate(v)) for v in (personalization, dangling)]
        return nx.pagerank(graph, D, as_dict[0], tol=1e-14, max_iter=2000, dangling=as_dict[1])

    check_pagerank(partial(networkx, **right), DANGLING, **right)
    with pytest.raises(AssertionError, match=message):
        check_pagerank(partial(networkx, **used), DANGLING, **right)


# ---- relabelling, agreement, bounds, matrices


@given(case=graph_and_relabelling())
def test_check_pagerank_relabelling_accepts_the_twin(case):
    check_pagerank_relabelling(twin, *case, tol=1e-12)


def test_check_pagerank_relabelling_rejects_scores_that_depend_on_the_id():
    def first_node_wins(graph):
        scores = twin(graph)
        return scores + 0.01 * (np.arange(len(scores)) == 0)

    relabelled = edges(3 - PLAIN.src, 3 - PLAIN.dst, 4)
    check_pagerank_relabelling(twin, PLAIN, relabelled, [3, 2, 1, 0])
    with pytest.raises(
        AssertionError, match=r"first_node_wins: node 0 holds .* the same node under its new id is"
    ):
        check_pagerank_relabelling(first_node_wins, PLAIN, relabelled, [3, 2, 1, 0])
    with pytest.raises(ValueError, match="its edges are others"):
        check_pagerank_relabelling(twin, PLAIN, relabelled, [0, 1, 2, 3])


def test_check_pagerank_agreement_names_the_two_that_differ_and_the_wrong_one():
    right = {"ours": twin, "theirs": partial(twin, rounds=300)}
    assert check_pagerank_agreement(right, DANGLING) < 1e-15
    with pytest.raises(AssertionError, match=r"ours: node 2 holds .*, leaky's score is ") as caught:
        check_pagerank_agreement({**right, "leaky": partial(twin, drop_dangling=True)}, DANGLING)
    assert "leaky's score is the wrong one; dangling mass dropped" in str(caught.value)
    with pytest.raises(ValueError, match="two or more with distinct names"):
        check_pagerank_agreement([twin, twin], PLAIN)


@dataclass(frozen=True)
class Result:
    scores: Any
    error_bound: float
    converged: bool


def bounded(graph, *, rounds, claim, converged=True):
    """Scores after some rounds with ``claim(step, error so far)`` as their bound."""
    before, after = twin(graph, rounds=rounds - 1), twin(graph, rounds=rounds)
    return Result(after, claim(float(np.abs(after - before).sum())), converged)


def banach(step):
    return D / (1 - D) * step + 1e-14


def test_check_error_bound_rejects_a_step_sold_as_a_bound():
    check_error_bound(partial(bounded, rounds=150, claim=banach), LOOPS)
    check_error_bound(partial(bounded, rounds=9, claim=banach, converged=False), LOOPS)
    path = CORNERS["path of 50 nodes"]
    with pytest.raises(
        AssertionError, match=r"error_bound is .*, the true L1 error is .*\n(.*\n)*.*bound is a step"
    ):
        check_error_bound(partial(bounded, rounds=20, claim=lambda step: step), path, tol=1)


def test_check_error_bound_rejects_a_claim_of_convergence():
    with pytest.raises(AssertionError, match=r"converged is True with error_bound .*, tol is 1.0e-08"):
        check_error_bound(partial(bounded, rounds=9, claim=banach), LOOPS)
    with pytest.raises(AssertionError, match="converged is False with error_bound"):
        check_error_bound(partial(bounded, rounds=300, claim=banach, converged=False), LOOPS)
    with pytest.raises(AssertionError, match="error_bound is nan"):
        check_error_bound(partial(bounded, rounds=300, claim=lambda _: np.nan), LOOPS)
    with pytest.raises(AssertionError, match=r"likely cause +dangling mass dropped"):
        check_error_bound(lambda g: Result(twin(g, drop_dangling=True), 1e-9, True), DANGLING)


def test_check_error_bound_rejects_a_solver_that_never_gets_there():
    check_error_bound(partial(bounded, rounds=150, claim=banach), LOOPS, reachable=True)
    modest = partial(bounded, rounds=150, claim=lambda step: 1.0, converged=False)
    check_error_bound(modest, LOOPS)
    with pytest.raises(AssertionError, match=r"error_bound is 1.000e\+00 in the end, tol is 1.0e-08, which can be"):
        check_error_bound(modest, LOOPS, reachable=True)


def test_check_error_bound_is_inconclusive_where_the_truth_is_unknown():
    with pytest.raises(Inconclusive, match="20000 nodes are too many"):
        check_error_bound(partial(bounded, rounds=9, claim=banach), many_dangling(20_000))


@given(graph=graphs())
def test_check_transition_matrix_accepts_the_twin(graph):
    check_transition_matrix(matrix, graph)
    check_transition_matrix(partial(matrix, dtype=np.float32), graph)


def test_check_transition_matrix_rejects_columns_that_do_not_sum_to_1():
    with pytest.raises(AssertionError, match=r"column 0 sums to 0.666666666667, expected 1"):
        check_transition_matrix(partial(matrix, counted="once"), REPEATED)
    with pytest.raises(
        AssertionError, match=r"column 0 sums to 0.5, expected 1\n  out-edges +0 -> 0, 0 -> 1"
    ):
        check_transition_matrix(partial(matrix, loops=False), LOOPS)
    with pytest.raises(AssertionError, match="the rows sum to 1: transposed"):
        check_transition_matrix(partial(matrix, transposed=True), PLAIN)
    with pytest.raises(AssertionError, match=r"entry \(0, 2\) is 0, node 2 sends node 0 1"):
        check_transition_matrix(lambda g: matrix(g)[[1, 0, 2]], LOOPS)
    with pytest.raises(AssertionError, match=r"the matrix has shape \(2, 3\), expected \(3, 3\)"):
        check_transition_matrix(lambda g: matrix(g)[:2], LOOPS)
