"""The sources of a graph, and the data that it keeps."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from pdlcheck.checks.pagerank.scores import check_pagerank
from pdlcheck.primitives.pagerank import Graph, as_graph, document_graph, pagerank_reference

from .cases import NEEDS_DGL, import_dgl


@pytest.mark.beyond_contract("graphs in every format")
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


@pytest.mark.beyond_contract("graphs in every format")
@NEEDS_DGL
@pytest.mark.verifies("pagerank")
def test_a_dgl_graph_is_read_with_its_edge_weights(subject):
    dgl = import_dgl()

    graph = dgl.graph(([0, 0, 1], [1, 2, 0]), num_nodes=4)
    graph.edata["w"] = torch.tensor([1.0, 3.0, 1.0])
    plain, weighted = as_graph(graph), Graph.from_dgl(graph, weight="w")
    assert plain.num_nodes == 4
    assert plain.weights is None
    assert weighted.weights.tolist() == [1, 3, 1]
    check_pagerank(lambda _: subject(graph), plain)
    check_pagerank(subject, weighted)


@pytest.mark.beyond_contract("graphs in every format")
@pytest.mark.verifies("pagerank")
def test_an_undirected_networkx_edge_counts_both_ways_and_a_self_loop_once(subject):
    graph = as_graph(nx.Graph([("a", "b"), ("b", "b")]))
    assert sorted(zip(graph.src.tolist(), graph.dst.tolist(), strict=True)) == [(0, 1), (1, 0), (1, 1)]
    assert graph.names == ("a", "b")
    check_pagerank(subject, graph)


@pytest.mark.beyond_contract("graphs in every format")
@pytest.mark.verifies("pagerank")
def test_nodes_of_a_networkx_graph_keep_their_names(subject):
    graph = nx.DiGraph([("x", "hub"), ("y", "hub")])
    result = subject(graph, personalization={"y": 2})
    assert [name for name, _ in result.top(3)] == ["y", "hub", "x"]
    assert result.scores[as_graph(graph).names.index("x")] == 0


@pytest.mark.beyond_contract("graphs in every format")
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
