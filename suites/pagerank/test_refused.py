"""Bad input of PageRank is refused at once, with an error that names its cure."""

from __future__ import annotations

import math
import warnings

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from pdlcheck.primitives.pagerank import Graph, as_graph, document_graph

from .cases import NEEDS_DGL, cases, each_primitive, each_version, import_dgl

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
    "more nodes than ids": (lambda: Graph.from_edges([], [], 2**63 + 1), r"num_nodes must be at most 2\*\*63, ids"),
    "num_nodes": (lambda: Graph.from_edges([], [], -1), "num_nodes must be 0 or more, got -1"),
    "names": (lambda: Graph(np.array([0]), np.array([1]), 2, names=("a", "a")), "2 distinct names"),
    "rectangular": (lambda: Graph.from_scipy(sp.coo_array((2, 3))), r"must be square, got shape \(2, 3\)"),
    "negative networkx weight": (
        lambda: as_graph(nx.DiGraph([(0, 1, {"weight": -1})])),
        "weights holds -1.0",
    ),
    "networkx weight of words": (lambda: as_graph(nx.DiGraph([(0, 1, {"weight": "x"})])), "must be a number"),
    "networkx weight beyond float64": (
        lambda: as_graph(nx.DiGraph([(0, 1, {"weight": 10**400})])),
        "must be a number",
    ),
    "weight of words": (lambda: Graph.from_edges([0], [1], 2, ["x"]), "weights must hold numbers .*'x'"),
    "weight of 1e400": (lambda: Graph.from_edges([0], [1], 2, [10**400]), "weights must hold numbers .*large"),
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


@NEEDS_DGL
@pytest.mark.verifies("pagerank")
def test_a_dgl_graph_of_several_types_is_refused():
    """Each node type has ids from 0, so edges between types do not identify nodes in one numbering."""
    dgl = import_dgl()
    typed = dgl.heterograph({("user", "likes", "item"): ([0, 1], [1, 0])})
    with pytest.raises(ValueError, match=r"one type of nodes .*'item'.*number all .* dgl.to_homogeneous\(graph\)"):
        as_graph(typed)
    assert as_graph(dgl.to_homogeneous(typed)).num_nodes == 4


@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("ids", [[0.5, 1.0], ["a", "b"], [True, False]], ids=["floats", "names", "bools"])
def test_ids_that_are_not_integers_are_refused(ids):
    with pytest.raises(TypeError, match="src must hold integers"):
        Graph.from_edges(ids, [0, 1])


def test_ids_that_are_masked_are_refused():
    with pytest.raises(ValueError, match="src is masked in places"):
        Graph.from_edges(np.ma.masked_array([0, 1], [0, 1]), [0, 1])
    assert Graph.from_edges(np.ma.masked_array([0, 1], [0, 0]), [0, 1]).num_edges == 2


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_number_of_best_nodes_that_cannot_be_is_refused(subject, count, error):
    with pytest.raises(error, match=f"count must be .*got {count}"):
        subject(TRIANGLE).top(count)
    assert len(subject(TRIANGLE).top(9)) == 3


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("graph", [[[0, 1], [1, 0]], np.eye(2), "web", None], ids=["list", "dense", "str", "None"])
def test_what_is_no_graph_is_refused(subject, graph):
    with pytest.raises(TypeError, match="graph: cannot read a"):
        subject(graph)


@pytest.mark.beyond_contract("error messages")
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
    "personalization masked": (
        {"personalization": np.ma.masked_array([1.0, 5.0, 2.0], [0, 1, 0])},
        "personalization is masked in places, where it has no values",
    ),
    "personalization empty": ({"personalization": {}}, "personalization is 0 everywhere"),
    "personalization of words": ({"personalization": ["a", "b", "c"]}, "personalization must hold numbers .*'a'"),
    "dict of words": ({"dangling": {0: "a"}}, "dangling must hold numbers .*'a'"),
    "dangling negative": ({"dangling": {0: -1}}, "dangling holds -1.0 at 0"),
    "dangling all 0": ({"dangling": [0, 0, 0]}, "dangling is 0 everywhere"),
}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("pagerank")
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_bad_argument_is_refused(subject, case):
    arguments, message = BAD_ARGUMENTS[case]
    with pytest.raises(ValueError, match=message):
        subject(TRIANGLE, **arguments)


@pytest.mark.beyond_contract("error messages")
@each_version
def test_a_version_refuses_bad_iterations_dtypes_and_missing_devices(subject, version):
    with pytest.raises(ValueError, match="iterations must be 1 or more, got 0"):
        subject(TRIANGLE, iterations=0)
    with pytest.raises(ValueError, match=r"dtype must be torch.float32 or torch.float64, got torch.float16"):
        subject(TRIANGLE, dtype=torch.float16)
    for device in ("gpu", 1.5, "cuda:x"):
        with pytest.raises(ValueError, match=rf"device must be 'cpu', 'cuda' or another .*, got {device!r}"):
            subject(TRIANGLE, device=device)
    with pytest.raises(ValueError, match="device is 'meta', whose tensors hold no numbers; use device='cpu'"):
        subject(TRIANGLE, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda', but torch sees no CUDA device; use device='cpu'"):
            subject(TRIANGLE, device="cuda")


@pytest.mark.beyond_contract("error messages")
@cases("pagerank_v2", "pagerank_v3", "pagerank_reference")
def test_a_dense_version_refuses_a_graph_that_cannot_fit(subject, version):
    huge = Graph.from_edges([0], [1], 10_000_000)
    with pytest.raises(MemoryError, match=f"{version} needs .* GiB"):
        subject(huge)


@pytest.mark.beyond_contract("error messages")
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


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("pagerank_v2")
@pytest.mark.gpu
def test_a_dense_version_on_cuda_fits_up_to_the_memory_of_the_device(subject):
    """Memory that torch caches from a freed matrix counts as free; a larger matrix is refused before allocation."""
    free = torch.cuda.mem_get_info()[0]
    n = int((0.6 * free / 4) ** 0.5)
    for _ in range(2):
        scores = subject(Graph.from_edges([0, 1], [1, 0], n), device="cuda", dtype=torch.float32, iterations=2)
        assert float(scores.sum()) == pytest.approx(1, abs=1e-3)
    with pytest.raises(MemoryError, match=r"a matrix of pagerank_v2 needs .* GiB, .* GiB are free"):
        subject(Graph.from_edges([0], [1], 2 * n), device="cuda", dtype=torch.float32)


@each_primitive
def test_no_warning_is_given(subject, version):
    """Some warnings of torch appear once a process, in whichever test runs first; here they appear always."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            for graph in (TRIANGLE, Graph.from_edges([0], [1], 3)):  # the second has vertices without out-edges
                subject(graph)
    finally:
        torch.set_warn_always(before)
    assert [f"{version} warns: {warning.message}" for warning in given] == []
