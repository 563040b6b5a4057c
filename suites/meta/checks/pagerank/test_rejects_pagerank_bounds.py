"""The checks of long sums, vectors, relabelling, agreement, bounds and matrices reject broken results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from pdlcheck.checks.graphs import CORNERS, graph_and_relabelling, graphs
from pdlcheck.checks.pagerank.scores import (
    check_error_bound,
    check_pagerank,
    check_pagerank_agreement,
    check_pagerank_relabelling,
    check_transition_matrix,
)
from pdlcheck.errors import Inconclusive

from .pagerank_by_hand import DANGLING, LOOPS, PLAIN, REPEATED, D, edges, matrix, twin


def many_dangling(count=100_000):
    rng = np.random.default_rng(0)
    return edges(rng.integers(0, 1000, 5000), rng.integers(0, count, 5000), count)


def rank_with_sum(graph, add, dtype):
    """Return the twin's scores in ``dtype``, with the dangling mass summed by ``add``."""
    n = graph.num_nodes
    degree = np.bincount(graph.src, minlength=n)
    x = np.full(n, 1 / n, dtype)
    for _ in range(150):
        arrived = np.bincount(graph.dst, (x / np.maximum(degree, 1))[graph.src], n)
        x = ((1 - D) / n + D * (arrived + float(add(x[degree == 0])) / n)).astype(dtype)
    return x


def running_sum(values):
    return np.cumsum(values.astype(np.float32))[-1]  # adds one number after the other, in float32


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
        AssertionError,
        match=r"one serial round further is .*\n(.*\n)*  likely cause +no known .*; note: the sum is below 1",
    ):
        check_pagerank(partial(twin, drop_dangling=True), graph)
    with pytest.raises(AssertionError, match="one serial round further is"):
        check_pagerank(partial(twin, rounds=3), graph)
    scores = twin(graph)
    scores[[0, 1]] += [1e-9, -2 * scores[1]]
    with pytest.raises(AssertionError, match="node 1"):
        check_pagerank(lambda _: scores, graph, tol=1e-3)


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


@given(case=graph_and_relabelling())
def test_check_pagerank_relabelling_accepts_the_twin(case):
    check_pagerank_relabelling(twin, *case, tol=1e-12)


def test_check_pagerank_relabelling_rejects_scores_that_depend_on_the_id():
    def first_node_wins(graph):
        scores = twin(graph)
        return scores + 0.01 * (np.arange(len(scores)) == 0)

    relabelled = edges(3 - PLAIN.src, 3 - PLAIN.dst, 4)
    check_pagerank_relabelling(twin, PLAIN, relabelled, [3, 2, 1, 0])
    with pytest.raises(AssertionError, match=r"first_node_wins: node 0 holds .* the same node under its new id is"):
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
    """Return scores after some rounds, with ``claim(length of the last step)`` as their error bound."""
    before, after = twin(graph, rounds=rounds - 1), twin(graph, rounds=rounds)
    return Result(after, claim(float(np.abs(after - before).sum())), converged)


def banach(step):
    return D / (1 - D) * step + 1e-14


def test_check_error_bound_rejects_a_step_sold_as_a_bound():
    check_error_bound(partial(bounded, rounds=150, claim=banach), LOOPS)
    check_error_bound(partial(bounded, rounds=9, claim=banach, converged=False), LOOPS)
    path = CORNERS["path of 50 nodes"]
    with pytest.raises(AssertionError, match=r"error_bound is .*, the true L1 error is .*\n(.*\n)*.*bound is a step"):
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
    with pytest.raises(AssertionError, match=r"column 0 sums to 0.5, expected 1\n  out-edges +0 -> 0, 0 -> 1"):
        check_transition_matrix(partial(matrix, loops=False), LOOPS)
    with pytest.raises(AssertionError, match="the rows sum to 1: transposed"):
        check_transition_matrix(partial(matrix, transposed=True), PLAIN)
    with pytest.raises(AssertionError, match=r"entry \(0, 2\) is 0, node 2 sends node 0 1"):
        check_transition_matrix(lambda g: matrix(g)[[1, 0, 2]], LOOPS)
    with pytest.raises(AssertionError, match=r"the matrix has shape \(2, 3\), expected \(3, 3\)"):
        check_transition_matrix(lambda g: matrix(g)[:2], LOOPS)
