"""The PageRank solver: bounds that hold, vectors, warm starts, the Debian packages."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks.graphs import graphs
from pdlcheck.checks.pagerank.scores import check_error_bound, check_pagerank, check_pagerank_agreement
from pdlcheck.primitives.pagerank import Graph, debian_dependencies, document_graph, pagerank_many, threads

from .cases import DAMPING, VERSIONS, cases, left_over


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-5, 1e-8, 1e-11, 1e-17]))
def test_error_bound_holds_for_the_true_error(subject, graph, damping, tol):
    function = partial(subject, damping=damping, tol=tol)
    check_error_bound(function, graph, damping=damping, tol=tol, reachable=tol > 1e-12)


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), rounds=st.integers(1, 12))
def test_error_bound_holds_when_max_iter_stops_it(subject, graph, rounds):
    check_error_bound(partial(subject, max_iter=rounds), graph)


def exact_ranks(graph: Graph, damping: float) -> list[Fraction]:
    """Return the exact ranks by Gauss-Jordan elimination on fractions."""
    n, d = graph.num_nodes, Fraction(damping)
    weights = [Fraction(w) for w in (np.ones(graph.num_edges) if graph.weights is None else graph.weights)]
    out = [sum(w for u, w in zip(graph.src, weights, strict=True) if u == i) for i in range(n)]
    rows = [[Fraction(i == j) - (0 if out[i] else d / n) for i in range(n)] + [(1 - d) / n] for j in range(n)]
    for u, v, w in zip(graph.src, graph.dst, weights, strict=True):
        rows[v][u] -= d * w / out[u] if w else 0
    for i in range(n):  # diagonally dominant by columns: no pivot is 0
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(n):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[n] for row in rows]


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges, max_nodes=4), damping=DAMPING)
def test_error_bound_holds_to_the_last_bit_where_only_rounding_is_left(subject, graph, damping):
    result = subject(graph, damping=damping, tol=1e-300)
    exact = exact_ranks(graph, damping)
    error = sum(abs(Fraction(x) - y) for x, y in zip(result.scores.tolist(), exact, strict=True))
    assert error <= Fraction(result.error_bound)
    assert result.error_bound < 1e-12


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.verifies("pagerank")
def test_a_slow_path_is_solved_to_its_tolerance(subject):
    path = Graph.from_edges(np.arange(999), np.arange(1, 1000))
    check_error_bound(partial(subject, tol=1e-9), path, tol=1e-9, reachable=True)
    check_error_bound(partial(subject, damping=0.999, tol=1e-9), path, damping=0.999, tol=1e-9, reachable=True)


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.verifies("pagerank")
def test_a_tolerance_finer_than_float64_is_reported_not_claimed(subject):
    result = subject(document_graph(50), tol=1e-18)
    assert not result.converged
    assert 1e-18 < result.error_bound < 1e-12


@pytest.mark.if_subject_takes("method")
@pytest.mark.verifies("pagerank")
def test_rounds_that_only_move_the_last_bits_come_to_an_end(subject):
    """Some graph needs 4568 rounds at this damping; here one round finds the ranks, and then one bit flips forever."""
    graph = Graph.from_edges([], [], 44)
    for method in ("power", "gauss-seidel"):
        result = subject(graph, damping=0.99, tol=1e-15, method=method)
        assert result.iterations < 400
        assert 1e-15 < result.error_bound < 2e-12
    many = pagerank_many(graph, [None, {0: 1}], damping=0.99, tol=1e-15)
    assert many[0].iterations < 400


@st.composite
def graphs_with_vectors(draw):
    graph = draw(graphs(Graph.from_edges).filter(lambda g: g.num_nodes > 0))
    numbers = st.lists(st.integers(0, 5), min_size=graph.num_nodes, max_size=graph.num_nodes).filter(any)
    return graph, np.array(draw(numbers)), draw(st.none() | numbers.map(np.array))


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.verifies(n)) for n in ("pagerank", "pagerank_reference")]
)
@given(case=graphs_with_vectors())
def test_personalization_and_dangling_vectors_are_honoured(subject, name, case):
    graph, v, w = case
    tol = left_over(name, 0.85)
    function = partial(subject, personalization=v, dangling=w)
    check_pagerank(function, graph, tol=tol, personalization=v, dangling=w)
    if name == "pagerank":
        check_error_bound(function, graph, personalization=v, dangling=w, reachable=True)


@pytest.mark.beyond_contract("graphs of networkx, and threads")
@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), damping=DAMPING)
def test_pagerank_is_that_of_networkx_where_networkx_has_converged(subject, graph, damping):
    """Only a MultiDiGraph of networkx adds repeated edges; networkx's default tolerance stops too early."""
    there = nx.MultiDiGraph()
    there.add_nodes_from(range(graph.num_nodes))
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights
    there.add_weighted_edges_from(zip(graph.src.tolist(), graph.dst.tolist(), weights.tolist(), strict=True))
    expected = nx.pagerank(there, alpha=damping, tol=1e-14, max_iter=2000)
    result = subject(there, damping=damping)
    allowed = 1e-8 + graph.num_nodes * 1e-14 * damping / (1 - damping)
    assert sum(abs(expected[i] - result.scores[i]) for i in range(graph.num_nodes)) <= allowed


@pytest.mark.beyond_contract("graphs of networkx, and threads")
@pytest.mark.verifies("pagerank")
def test_the_same_bits_with_any_number_of_threads(monkeypatch, subject):
    rng = np.random.default_rng(0)
    graph = Graph(rng.integers(0, 9_000, 2_000_000), rng.integers(0, 10_000, 2_000_000), 10_000)
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    before = torch.get_num_threads()
    bits = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            bits.add(subject(graph).scores.tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(bits) == 1


@st.composite
def graphs_in_several_blocks(draw):
    """Draw more edges than a block holds, rows too long for a slice, and a node count that fills no slice."""
    n = draw(st.integers(300, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    src, dst = rng.integers(0, n - draw(st.integers(0, 50)), (2, 1_200_000))
    few = rng.random(len(dst)) < 0.9
    dst[few] = (dst[few] * rng.random(few.sum()) ** 2).astype(np.int64)
    weights = rng.random(len(src)) if draw(st.booleans()) else None
    return Graph(src, dst, n, weights)


@pytest.mark.if_subject_takes("method")
@pytest.mark.verifies("pagerank")
@settings(max_examples=8)
@given(
    graph=graphs_in_several_blocks(),
    tol=st.sampled_from([1e-4, 1e-6, 2e-7, 1e-8, 1e-12]),
    method=st.sampled_from(["power", "gauss-seidel"]),
)
def test_error_bound_holds_on_graphs_of_several_blocks(subject, graph, tol, method):
    """The rounds start in float32, which reaches a bound above its rounding; a smaller bound needs float64."""
    check_error_bound(partial(subject, tol=tol, method=method), graph, tol=tol, reachable=tol > 1e-12)


@pytest.mark.if_subject_takes("method")
@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), damping=DAMPING, method=st.sampled_from(["power", "gauss-seidel"]))
def test_both_methods_keep_their_bound(subject, graph, damping, method):
    check_error_bound(partial(subject, damping=damping, method=method), graph, damping=damping, reachable=True)


@pytest.mark.if_subject_takes("method", "start")
@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("method", ["power", "gauss-seidel"])
def test_a_change_of_the_dangling_mass_counts_in_the_bound(subject, method):
    """Node 0 starts with a part of the score of node 2, which is dangling and gets the mass of all dangling nodes."""
    graph, to_2, damping = Graph.from_edges([0, 1], [1, 1], 3), [0.0, 0.0, 1.0], 0.1
    ranks = subject(graph, damping=damping, dangling=to_2, tol=1e-14).scores
    start = ranks + np.array([0.2, 0.0, -0.2])
    function = partial(subject, damping=damping, dangling=to_2, start=start, method=method, max_iter=1)
    check_error_bound(function, graph, damping=damping, dangling=to_2)


@pytest.mark.beyond_contract("results that carry an error bound")
@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("leaves", [1, 15, 16, 17, 511, 512, 513, 5000])
def test_a_hub_is_ranked_whatever_the_length_of_its_row(subject, leaves):
    """All leaves point to the hub, and the hub to one of them; the ranks are computed by hand."""
    graph = Graph.from_edges([*range(1, leaves + 1), 0], [0] * leaves + [1])
    n, d = leaves + 1, 0.85
    base = (1 - d) / n
    hub = base * (1 + leaves * d) / (1 - d * d)
    expected = np.full(n, base)
    expected[:2] = hub, base + d * hub
    result = subject(graph, tol=1e-12)
    assert np.abs(result.scores - expected).sum() <= 1e-12


@pytest.mark.if_subject_takes("method")
@pytest.mark.verifies("pagerank")
def test_gauss_seidel_takes_fewer_rounds_where_ranks_spread_slowly(subject, debian):
    power, gauss_seidel = (subject(debian, tol=1e-8, method=m) for m in ("power", "gauss-seidel"))
    assert gauss_seidel.iterations < 0.7 * power.iterations


@pytest.mark.if_subject_takes("start")
@pytest.mark.verifies("pagerank")
def test_a_warm_start_needs_fewer_rounds_after_an_edge_has_changed(subject, debian):
    before = subject(debian, tol=1e-8)
    dst = debian.dst.copy()
    dst[0] = (dst[0] + 1) % debian.num_nodes
    changed = Graph(debian.src, dst, debian.num_nodes)
    cold, warm = subject(changed, tol=1e-8), subject(changed, tol=1e-8, start=before.scores)
    assert np.abs(cold.scores - warm.scores).sum() <= 2e-8
    assert warm.iterations < 0.7 * cold.iterations


# ---- the Debian packages


@pytest.fixture(scope="module")
def debian():
    return debian_dependencies()


@pytest.mark.verifies("pagerank")
def test_the_debian_graph_is_the_pinned_one(debian):
    assert (debian.num_nodes, debian.num_edges, int(debian.dangling.sum())) == (63664, 275976, 7789)
    assert len(np.unique(debian.src.astype(np.int64) * debian.num_nodes + debian.dst)) == debian.num_edges
    libc, bash = debian.names.index("libc6"), debian.names.index("bash")
    assert [debian.names[i] for i in debian.dst[debian.src == libc]] == ["libgcc-s1"]
    assert (debian.dst == libc).sum() > 15_000
    assert {debian.names[i] for i in debian.dst[debian.src == bash]} >= {"base-files", "debianutils", "libc6"}


@cases("pagerank_v0", "pagerank_v1", "pagerank")
def test_the_debian_packages_are_ranked(subject, version, debian):
    check_pagerank(subject, debian, tol=left_over(version, 0.85))


@pytest.mark.slow
@pytest.mark.verifies("pagerank")
def test_the_debian_ranks_agree_between_versions_and_networkx(subject, debian):
    sparse = {n: f for n, f in VERSIONS.items() if n in ("pagerank_v0", "pagerank_v1")}
    names = np.array(debian.names)
    graph = nx.DiGraph(zip(names[debian.src].tolist(), names[debian.dst].tolist(), strict=True))
    graph.add_nodes_from(debian.names)
    named = {**sparse, "pagerank": partial(subject, tol=1e-11)}
    named["networkx"] = lambda _: nx.pagerank(graph, tol=1e-15, max_iter=2000)
    check_pagerank_agreement(named, debian, tol=1e-9)  # networkx stops at a step of num_nodes * tol = 6e-11
    top = [name for name, _ in subject(debian).top(3)]
    assert top == ["libc6", "libgcc-s1", "gcc-12-base"]
