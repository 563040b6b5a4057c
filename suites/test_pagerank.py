"""PageRank: versions and solver against the dense solution, each other, networkx, and the contract."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from functools import partial
from importlib.util import find_spec

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks.graphs import CORNERS, graph_and_relabelling, graphs
from pdlcheck.checks.pagerank import (
    check_error_bound,
    check_pagerank,
    check_pagerank_agreement,
    check_pagerank_relabelling,
    check_transition_matrix,
)
from pdlcheck.primitives.pagerank import (
    Graph,
    as_graph,
    debian_dependencies,
    document_graph,
    pagerank,
    pagerank_reference,
    pagerank_v0,
    pagerank_v1,
    pagerank_v2,
    pagerank_v3,
)

DAMPING = st.sampled_from([0.85, 0.0, 0.3, 0.95])
VERSIONS = {"pagerank_v1": pagerank_v1, "pagerank_v2": pagerank_v2, "pagerank_v3": pagerank_v3}
NEEDS_DGL = pytest.mark.skipif(
    find_spec("dgl") is None, reason="pagerank_v0 needs DGL, which is missing: pip install pdlcheck[dgl]"
)
if find_spec("dgl") is not None:
    VERSIONS["pagerank_v0"] = pagerank_v0


def cases(*names: str) -> pytest.MarkDecorator:
    """Parametrize ``version`` over primitives, so that each test is about one of them."""
    marks = {"pagerank_v0": [NEEDS_DGL]}
    params = [pytest.param(n, marks=[pytest.mark.verifies(n), *marks.get(n, [])]) for n in names]
    return pytest.mark.parametrize("version", params)


each_version = cases("pagerank_v0", "pagerank_v1", "pagerank_v2", "pagerank_v3")
each_primitive = cases("pagerank_v0", "pagerank_v1", "pagerank_v2", "pagerank_v3", "pagerank", "pagerank_reference")


def left_over(version: str, damping: float) -> float:
    """The L1 error that the primitive may leave: 200 rounds leave 2 d**200, the solver its tolerance."""
    return {"pagerank": 1e-8, "pagerank_reference": 0.0}.get(version, 2 * damping**200)


# ---- the right scores


@each_primitive
@given(graph=graphs(Graph.from_edges), damping=DAMPING)
def test_scores_are_the_dense_solution(subject, version, graph, damping):
    tol = left_over(version, damping)
    check_pagerank(partial(subject, damping=damping), graph, damping=damping, tol=tol)


@each_primitive
@pytest.mark.parametrize("corner", CORNERS)
def test_scores_of_a_named_graph_are_the_dense_solution(subject, version, corner):
    edges = CORNERS[corner]
    graph = Graph.from_edges(edges.src, edges.dst, edges.num_nodes, edges.weights)
    check_pagerank(subject, graph, tol=left_over(version, 0.85))


@each_primitive
@given(case=graph_and_relabelling(Graph.from_edges))
def test_renaming_nodes_permutes_scores(subject, version, case):
    check_pagerank_relabelling(subject, *case, tol=left_over(version, 0.85))


@each_version
@given(graph=graphs(Graph.from_edges))
def test_float32_is_right_within_its_rounding(subject, version, graph):
    check_pagerank(partial(subject, dtype=torch.float32), graph, tol=left_over(version, 0.85))


@pytest.mark.verifies("pagerank_v1")
@given(graph=graphs(Graph.from_edges), damping=DAMPING)
def test_all_versions_agree(graph, damping):
    named = {name: partial(f, damping=damping) for name, f in VERSIONS.items()}
    named["pagerank"] = partial(pagerank, damping=damping, tol=1e-12)
    check_pagerank_agreement(named, graph, damping=damping, tol=max(1e-12, left_over("pagerank_v1", damping)))


@pytest.mark.parametrize("version", ["pagerank_v1"])
@pytest.mark.verifies("pagerank_v1")
@given(graph=graphs(Graph.from_edges))
def test_the_published_coo_layout_gives_the_same_scores(subject, version, graph):
    check_pagerank(partial(subject, layout="coo"), graph, tol=left_over(version, 0.85))


@pytest.mark.verifies("pagerank_v3")
@given(graph=graphs(Graph.from_edges))
def test_the_published_fold_by_a_matrix_product_gives_the_same_scores(subject, graph):
    check_pagerank(partial(subject, fold="matmul"), graph, tol=left_over("pagerank_v3", 0.85))


@pytest.mark.verifies("transition_matrix")
@pytest.mark.parametrize("fold", ["scale", "matmul"])
@given(graph=graphs(Graph.from_edges))
def test_columns_of_the_transition_matrix_sum_to_1(subject, fold, graph):
    check_transition_matrix(partial(subject, fold=fold), graph)


@each_version
def test_scores_of_the_published_graph_are_the_dense_solution(subject, version):
    check_pagerank(subject, document_graph(300, mean_degree=15), tol=left_over(version, 0.85))


@each_version
@pytest.mark.gpu
def test_scores_on_cuda_are_the_dense_solution(subject, version):
    graph = document_graph(300, mean_degree=15)
    if version == "pagerank_v0" and not dgl_has_cuda():
        pytest.skip("this DGL is built for the CPU; pip has none for CUDA that imports with this torch")
    for dtype in (torch.float64, torch.float32):
        check_pagerank(partial(subject, device="cuda", dtype=dtype), graph, tol=left_over(version, 0.85))


def dgl_has_cuda() -> bool:
    try:
        pagerank_v0(([0, 1], [1, 0]), device="cuda", iterations=1)
    except ValueError:
        return False
    return True


def every_pair(device: str) -> dict[str, partial]:
    """Each version as published and as used, in both precisions."""
    layouts = {"v1": partial(pagerank_v1, layout="csr"), "v1 coo": partial(pagerank_v1, layout="coo")}
    folds = {"v3": partial(pagerank_v3, fold="scale"), "v3 matmul": partial(pagerank_v3, fold="matmul")}
    named = {**layouts, "v2": pagerank_v2, **folds}
    if "pagerank_v0" in VERSIONS and (device == "cpu" or dgl_has_cuda()):
        named["v0"] = pagerank_v0
    return {
        f"{name} {device} {str(dtype)[6:]}": partial(version, device=device, dtype=dtype)
        for name, version in named.items()
        for dtype in (torch.float32, torch.float64)
    }


@pytest.mark.verifies("pagerank_v1")
@settings(max_examples=10)
@given(graph=graphs(Graph.from_edges))
def test_every_version_in_either_precision_has_the_same_ranks(graph):
    named = {**every_pair("cpu"), "exact": pagerank_reference}
    check_pagerank_agreement(named, graph, tol=left_over("pagerank_v1", 0.85))


@pytest.mark.verifies("pagerank_v1")
@pytest.mark.gpu
@given(graph=graphs(Graph.from_edges))
def test_every_version_on_either_device_in_either_precision_has_the_same_ranks(graph):
    named = {**every_pair("cpu"), **every_pair("cuda"), "exact": pagerank_reference}
    check_pagerank_agreement(named, graph, tol=left_over("pagerank_v1", 0.85))


# ---- the solver


@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), damping=DAMPING, tol=st.sampled_from([1e-2, 1e-5, 1e-8, 1e-11, 1e-17]))
def test_error_bound_holds_for_the_true_error(subject, graph, damping, tol):
    check_error_bound(partial(subject, damping=damping, tol=tol), graph, damping=damping, tol=tol)


@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), rounds=st.integers(1, 12))
def test_error_bound_holds_when_max_iter_stops_it(subject, graph, rounds):
    check_error_bound(partial(subject, max_iter=rounds), graph)


def exact_ranks(graph: Graph, damping: float) -> list[Fraction]:
    """The ranks without any rounding: Gauss-Jordan elimination on fractions."""
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


@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges, max_nodes=4), damping=DAMPING)
def test_error_bound_holds_to_the_last_bit_where_only_rounding_is_left(subject, graph, damping):
    result = subject(graph, damping=damping, tol=1e-300)
    exact = exact_ranks(graph, damping)
    error = sum(abs(Fraction(x) - y) for x, y in zip(result.scores.tolist(), exact, strict=True))
    assert error <= Fraction(result.error_bound)
    assert result.error_bound < 1e-12


@pytest.mark.verifies("pagerank")
def test_a_slow_path_is_solved_to_its_tolerance(subject):
    path = Graph.from_edges(np.arange(999), np.arange(1, 1000))
    check_error_bound(partial(subject, tol=1e-9), path, tol=1e-9)
    check_error_bound(partial(subject, damping=0.999, tol=1e-9), path, damping=0.999, tol=1e-9)


@pytest.mark.verifies("pagerank")
def test_a_tolerance_finer_than_float64_is_reported_not_claimed(subject):
    result = subject(document_graph(50), tol=1e-18)
    assert not result.converged
    assert 1e-18 < result.error_bound < 1e-12


@st.composite
def graphs_with_vectors(draw):
    graph = draw(graphs(Graph.from_edges).filter(lambda g: g.num_nodes > 0))
    numbers = st.lists(st.integers(0, 5), min_size=graph.num_nodes, max_size=graph.num_nodes).filter(any)
    return graph, np.array(draw(numbers)), draw(st.none() | numbers.map(np.array))


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
        check_error_bound(function, graph, personalization=v, dangling=w)


@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), damping=DAMPING)
def test_pagerank_is_that_of_networkx_where_networkx_has_converged(subject, graph, damping):
    """networkx adds repeated edges in a MultiDiGraph only; its default tolerance stops too early."""
    there = nx.MultiDiGraph()
    there.add_nodes_from(range(graph.num_nodes))
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights
    there.add_weighted_edges_from(zip(graph.src.tolist(), graph.dst.tolist(), weights.tolist(), strict=True))
    expected = nx.pagerank(there, alpha=damping, tol=1e-14, max_iter=2000)
    result = subject(there, damping=damping)
    allowed = 1e-8 + graph.num_nodes * 1e-14 * damping / (1 - damping)
    assert sum(abs(expected[i] - result.scores[i]) for i in range(graph.num_nodes)) <= allowed


@pytest.mark.verifies("pagerank")
def test_the_same_bits_with_any_number_of_threads(subject):
    rng = np.random.default_rng(0)
    graph = Graph(rng.integers(0, 9_000, 2_000_000), rng.integers(0, 10_000, 2_000_000), 10_000)
    before = torch.get_num_threads()
    bits = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            bits.add(subject(graph).scores.tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(bits) == 1


@st.composite
def graphs_in_several_blocks(draw):
    """More edges than a block holds, some rows too long for a slice, and a number of nodes that fills no slice."""
    n = draw(st.integers(300, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    src, dst = rng.integers(0, n - draw(st.integers(0, 50)), (2, 1_200_000))
    few = rng.random(len(dst)) < 0.9
    dst[few] = (dst[few] * rng.random(few.sum()) ** 2).astype(np.int64)
    weights = rng.random(len(src)) if draw(st.booleans()) else None
    return Graph(src, dst, n, weights)


@pytest.mark.verifies("pagerank")
@settings(max_examples=8)
@given(
    graph=graphs_in_several_blocks(),
    tol=st.sampled_from([1e-4, 1e-6, 2e-7, 1e-8, 1e-12]),
    method=st.sampled_from(["power", "gauss-seidel"]),
)
def test_error_bound_holds_on_graphs_of_several_blocks(subject, graph, tol, method):
    """They begin in float32: a bound above its rounding is reached in it, one below needs float64."""
    check_error_bound(partial(subject, tol=tol, method=method), graph, tol=tol)


@pytest.mark.verifies("pagerank")
@given(graph=graphs(Graph.from_edges), damping=DAMPING, method=st.sampled_from(["power", "gauss-seidel"]))
def test_both_methods_keep_their_bound(subject, graph, damping, method):
    check_error_bound(partial(subject, damping=damping, method=method), graph, damping=damping)


@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("leaves", [1, 15, 16, 17, 511, 512, 513, 5000])
def test_a_hub_is_ranked_whatever_the_length_of_its_row(subject, leaves):
    """All leaves point to the hub, the hub to one of them: ranks by hand."""
    graph = Graph.from_edges([*range(1, leaves + 1), 0], [0] * leaves + [1])
    n, d = leaves + 1, 0.85
    base = (1 - d) / n
    hub = base * (1 + leaves * d) / (1 - d * d)
    expected = np.full(n, base)
    expected[:2] = hub, base + d * hub
    result = subject(graph, tol=1e-12)
    assert np.abs(result.scores - expected).sum() <= 1e-12


@pytest.mark.verifies("pagerank")
def test_gauss_seidel_takes_fewer_rounds_where_ranks_spread_slowly(subject, debian):
    power, gauss_seidel = (subject(debian, tol=1e-8, method=m) for m in ("power", "gauss-seidel"))
    assert gauss_seidel.iterations < 0.7 * power.iterations


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


# ---- what a graph can be made of


@pytest.mark.verifies("pagerank")
def test_the_same_edges_in_every_format_give_the_same_scores(subject):
    src, dst = [0, 0, 1, 2, 2], [1, 2, 2, 0, 2]
    expected = pagerank_reference(Graph.from_edges(src, dst))
    matrix = sp.coo_array((np.ones(5), (src, dst)), shape=(3, 3))
    formats = {
        "arrays": (np.array(src), np.array(dst)),
        "tensors": (torch.tensor(src), torch.tensor(dst), torch.full((5,), 2.0)),
        "networkx": nx.DiGraph(zip(src, dst, strict=True)),
        "coo": matrix,
        "csr": matrix.tocsr(),
        "matrix": sp.csc_matrix(matrix),
    }
    for name, graph in formats.items():
        assert np.abs(subject(graph).scores - expected).sum() < 1e-8, name


@NEEDS_DGL
@pytest.mark.verifies("pagerank")
def test_a_dgl_graph_is_read_with_its_edge_weights(subject):
    import dgl

    graph = dgl.graph(([0, 0, 1], [1, 2, 0]), num_nodes=4)
    graph.edata["w"] = torch.tensor([1.0, 3.0, 1.0])
    plain, weighted = as_graph(graph), Graph.from_dgl(graph, weight="w")
    assert plain.num_nodes == 4 and plain.weights is None
    assert weighted.weights.tolist() == [1, 3, 1]
    check_pagerank(lambda _: subject(graph), plain)
    check_pagerank(subject, weighted)


@pytest.mark.verifies("pagerank")
def test_an_undirected_networkx_edge_counts_both_ways_and_a_self_loop_once(subject):
    graph = as_graph(nx.Graph([("a", "b"), ("b", "b")]))
    assert sorted(zip(graph.src.tolist(), graph.dst.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 1)]
    assert graph.names == ("a", "b")
    check_pagerank(subject, graph)


@pytest.mark.verifies("pagerank")
def test_nodes_of_a_networkx_graph_keep_their_names(subject):
    graph = nx.DiGraph([("x", "hub"), ("y", "hub")])
    result = subject(graph, personalization={"y": 2})
    assert [name for name, _ in result.top(3)] == ["y", "hub", "x"]
    assert result.scores[as_graph(graph).names.index("x")] == 0


@pytest.mark.verifies("pagerank")
def test_duplicate_entries_of_a_sparse_matrix_add(subject):
    matrix = sp.coo_array(([1.0, 1.0, 2.0], ([0, 0, 0], [1, 1, 2])), shape=(3, 3))
    check_pagerank(lambda _: subject(matrix), Graph.from_edges([0, 0], [1, 2], 3, [2, 2]))


@pytest.mark.verifies("pagerank")
def test_a_graph_cannot_change_after_its_checks():
    src = np.array([0, 1])
    graph = Graph.from_edges(src, [1, 0])
    src[0] = 7
    assert graph.src[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        graph.src[0] = 7
    with pytest.raises(AttributeError):
        graph.num_nodes = 1


@pytest.mark.verifies("pagerank")
def test_the_published_graph_has_its_ring_and_no_repeated_edge():
    graph = document_graph(200, mean_degree=20, seed=3)
    pairs = set(zip(graph.src.tolist(), graph.dst.tolist(), strict=True))
    assert len(pairs) == graph.num_edges
    assert all((i, (i + 1) % 200) in pairs for i in range(200))
    assert not graph.dangling.any()
    assert 20 * 200 * 0.9 < graph.num_edges < 22 * 200 * 1.1
    assert np.array_equal(graph.src, document_graph(200, mean_degree=20, seed=3).src)


# ---- bad input: named at once, with its cure

TRIANGLE = ([0, 1, 2], [1, 2, 0])
BAD_GRAPHS = {
    "id above": (lambda: Graph.from_edges([0, 5], [1, 1], 3), r"src holds 5 at 1, ids must be in \[0, 3\)"),
    "id below": (lambda: Graph.from_edges([0], [-1], 3), r"dst holds -1 at 0, ids must be in \[0, 3\)"),
    "id below, no num_nodes": (lambda: Graph.from_edges([0], [-1]), r"dst holds -1 at 0"),
    "negative weight": (lambda: Graph.from_edges([0, 0], [1, 0], 2, [1, -2]), "weights holds -2.0 at 1"),
    "NaN weight": (lambda: Graph.from_edges([0], [1], 2, [math.nan]), "weights holds nan at 0"),
    "infinite weight": (lambda: Graph.from_edges([0], [1], 2, [math.inf]), "weights holds inf at 0"),
    "weights too short": (
        lambda: Graph.from_edges([0, 1], [1, 0], 2, [1]),
        r"shape \(2,\), got shape \(1,\)",
    ),
    "lengths": (lambda: Graph.from_edges([0, 1], [1]), "got lengths 2 and 1; make them equally long"),
    "matrix of ids": (lambda: Graph.from_edges([[0, 1]], [[1, 0]]), "src must be one-dimensional"),
    "num_nodes": (lambda: Graph.from_edges([], [], -1), "num_nodes must be 0 or more, got -1"),
    "names": (lambda: Graph(np.array([0]), np.array([1]), 2, names=("a", "a")), "2 distinct names"),
    "rectangular": (lambda: Graph.from_scipy(sp.coo_array((2, 3))), r"must be square, got shape \(2, 3\)"),
    "negative networkx weight": (
        lambda: as_graph(nx.DiGraph([(0, 1, {"weight": -1})])),
        "weights holds -1.0",
    ),
    "networkx weight of words": (lambda: as_graph(nx.DiGraph([(0, 1, {"weight": "x"})])), "must be a number"),
    "ring of one": (lambda: document_graph(1), "num_nodes must be 2 or more"),
    "degree": (lambda: document_graph(5, mean_degree=9), r"mean_degree must be in \[0, 4\]"),
    "permutation": (
        lambda: as_graph(TRIANGLE).relabelled([0, 0, 1]),
        "permutation must hold each id below 3 once",
    ),
}


@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_bad_graph_is_refused(case):
    make, message = BAD_GRAPHS[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("ids", [[0.5, 1.0], ["a", "b"], [True, False]], ids=["floats", "names", "bools"])
def test_ids_that_are_not_integers_are_refused(ids):
    with pytest.raises(TypeError, match="src must hold integers"):
        Graph.from_edges(ids, [0, 1])


@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("graph", [[[0, 1], [1, 0]], np.eye(2), "web", None], ids=["list", "dense", "str", "None"])
def test_what_is_no_graph_is_refused(subject, graph):
    with pytest.raises(TypeError, match="graph: cannot read a"):
        subject(graph)


@each_primitive
@pytest.mark.parametrize("damping", [1, 1.5, -0.1, math.nan], ids=str)
def test_a_damping_outside_0_to_1_is_refused(subject, version, damping):
    with pytest.raises(ValueError, match=rf"damping must be in \[0, 1\), got {damping}; the usual value is 0.85"):
        subject(TRIANGLE, damping=damping)


BAD_ARGUMENTS = {
    "tol 0": ({"tol": 0}, "tol must be a positive number.* got 0"),
    "tol NaN": ({"tol": math.nan}, "tol must be a positive number.* got nan"),
    "max_iter": ({"max_iter": 0}, "max_iter must be 1 or more, got 0"),
    "personalization all 0": (
        {"personalization": [0, 0, 0]},
        "personalization is 0 everywhere; give at least",
    ),
    "personalization negative": ({"personalization": [1, -1, 1]}, "personalization holds -1.0 at 1"),
    "personalization NaN": ({"personalization": [1, math.nan, 1]}, "personalization holds nan at 1"),
    "personalization short": (
        {"personalization": [1, 1]},
        r"one number per node, shape \(3,\), got shape \(2,\)",
    ),
    "personalization unknown": ({"personalization": {9: 1}}, "personalization: 9 is not a node of the graph"),
    "personalization empty": ({"personalization": {}}, "personalization is 0 everywhere"),
    "dangling negative": ({"dangling": {0: -1}}, "dangling holds -1.0 at 0"),
    "dangling all 0": ({"dangling": [0, 0, 0]}, "dangling is 0 everywhere"),
}


@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused(subject, case):
    arguments, message = BAD_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        subject(TRIANGLE, **arguments)


@each_version
def test_a_version_refuses_bad_iterations_dtypes_and_missing_devices(subject, version):
    with pytest.raises(ValueError, match="iterations must be 1 or more, got 0"):
        subject(TRIANGLE, iterations=0)
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.float16"):
        subject(TRIANGLE, dtype=torch.float16)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda', but torch sees no CUDA device; use device='cpu'"):
            subject(TRIANGLE, device="cuda")


@cases("pagerank_v2", "pagerank_v3", "pagerank_reference")
def test_a_dense_version_refuses_a_graph_that_cannot_fit(subject, version):
    huge = Graph.from_edges([0], [1], 10_000_000)
    with pytest.raises(MemoryError, match=f"{version} needs .* GiB"):
        subject(huge)


@pytest.mark.verifies("pagerank_v3")
@pytest.mark.parametrize(
    ("dtype", "fold", "gib"),
    [
        (torch.float64, "scale", "745058.1"),
        (torch.float64, "matmul", "2235174.2"),  # three matrices
        (torch.float32, "scale", "372529.0"),
    ],
)
def test_the_refusal_names_what_is_needed(subject, dtype, fold, gib):
    huge = Graph.from_edges([0], [1], 10_000_000)
    with pytest.raises(MemoryError, match=rf"a matrix of pagerank_v3 needs {gib} GiB, .* are free; use pagerank_v1"):
        subject(huge, dtype=dtype, fold=fold)


@pytest.mark.verifies("pagerank_v2")
@pytest.mark.gpu
def test_a_dense_version_on_cuda_fits_up_to_the_memory_of_the_device(subject):
    """What torch keeps of a freed matrix counts as there; a larger one is refused, and nothing is allocated."""
    free = torch.cuda.mem_get_info()[0]
    n = int((0.6 * free / 4) ** 0.5)
    for _ in range(2):
        scores = subject(Graph.from_edges([0, 1], [1, 0], n), device="cuda", dtype=torch.float32, iterations=2)
        assert float(scores.sum()) == pytest.approx(1, abs=1e-3)
    with pytest.raises(MemoryError, match=r"a matrix of pagerank_v2 needs .* GiB, .* GiB are free"):
        subject(Graph.from_edges([0], [1], 2 * n), device="cuda", dtype=torch.float32)


@each_primitive
def test_no_warning_is_given(subject, version):
    """Some of torch's come once a process, in whichever test is first; here they come always."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for graph in (TRIANGLE, Graph.from_edges([0], [1], 3)):  # the second has vertices without a way out
                subject(graph)
    finally:
        torch.set_warn_always(before)
    assert [f"{version} warns: {warning.message}" for warning in given] == []
