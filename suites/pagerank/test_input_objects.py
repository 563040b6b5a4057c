"""Objects of other libraries as sources of a graph, right ones and wrong ones."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.checks.graphs import graphs
from pdlcheck.primitives.pagerank import Graph


def edges_of(graph):
    """Return the edges in the order of their ends, each with its weight."""
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights
    return sorted(zip(graph.src.tolist(), graph.dst.tolist(), weights.tolist(), strict=True))


def merged(graph):
    """Return the total weight between each two nodes that have edges."""
    total: dict[tuple[int, int], float] = {}
    for u, v, weight in edges_of(graph):
        total[u, v] = total.get((u, v), 0) + weight
    return total


def sparse_tensor(graph):
    weights = np.ones(graph.num_edges) if graph.weights is None else graph.weights
    ids = torch.from_numpy(np.stack([graph.src, graph.dst]).astype(np.int64))
    size = (graph.num_nodes, graph.num_nodes)
    return torch.sparse_coo_tensor(ids, torch.from_numpy(weights.copy()), size, check_invariants=True)


@pytest.mark.verifies("as_graph")
@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support:UserWarning")
@given(graph=graphs(Graph.from_edges))
def test_a_torch_sparse_matrix_is_read_in_every_layout(subject, graph):
    """A COO matrix keeps edges that occur twice; the other layouts hold their sum."""
    matrix = sparse_tensor(graph)
    assert edges_of(subject(matrix)) == edges_of(graph)
    for layout in (matrix.coalesce(), matrix.to_sparse_csr(), matrix.to_sparse_csc()):
        found = subject(layout)
        assert merged(found) == merged(graph)
        assert found.num_nodes == graph.num_nodes


@pytest.mark.verifies("as_graph")
@given(graph=graphs(Graph.from_edges), dtype=st.sampled_from([torch.int64, torch.int32]))
def test_an_edge_index_is_two_rows_src_and_dst(subject, graph, dtype):
    edge_index = torch.from_numpy(np.stack([graph.src, graph.dst]).astype(np.int64)).to(dtype)
    assert edges_of(subject(edge_index)) == edges_of(Graph.from_edges(graph.src, graph.dst))


@pytest.mark.verifies("as_graph")
def test_two_edges_are_an_edge_index_too_and_a_tuple_of_two_tensors_is_src_and_dst(subject):
    two = torch.tensor([[0, 1], [2, 3]])
    assert edges_of(subject(two)) == [(0, 2, 1), (1, 3, 1)]
    assert edges_of(subject((two[0], two[1]))) == [(0, 2, 1), (1, 3, 1)]


@pytest.mark.verifies("as_graph")
@given(graph=graphs(Graph.from_edges))
def test_a_pyg_data_is_read_with_its_nodes_and_weights(subject, graph):
    data = SimpleNamespace(edge_index=torch.tensor([graph.src.tolist(), graph.dst.tolist()], dtype=torch.int64))
    data.num_nodes = graph.num_nodes
    if graph.weights is not None:
        data.edge_weight = torch.tensor(graph.weights)
    found = subject(data)
    assert edges_of(found) == edges_of(graph)
    assert found.num_nodes == graph.num_nodes


@pytest.mark.verifies("as_graph")
def test_a_sparse_matrix_of_ones_has_no_weights(subject):
    matrix = sp.csr_array(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert subject(matrix).weights is None
    assert subject(torch.eye(3).to_sparse()).weights is None


BAD_OBJECTS = {
    "dense tensor": (lambda: torch.eye(2), TypeError, r"an edge_index, integers of shape \(2, num_edges\), got"),
    "edges as rows": (
        lambda: torch.tensor([[0, 1], [1, 2], [2, 0]]),
        TypeError,
        r"of shape \(3, 2\); pass edges as two rows, or an adjacency as matrix.to_sparse\(\)",
    ),
    "bools": (lambda: torch.ones(2, 2, dtype=torch.bool), TypeError, "got torch.bool"),
    "not square": (lambda: torch.ones(2, 3).to_sparse(), ValueError, r"must be square, got shape \(2, 3\)"),
    "three dimensions": (lambda: torch.ones(2, 2, 3).to_sparse(), ValueError, r"must be square, got shape \(2, 2, 3\)"),
    "blocks": (
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        TypeError,
        r"a tensor of layout torch.sparse_bsr; convert it with .to_sparse_csr\(\)",
    ),
    "no edge_index": (lambda: SimpleNamespace(edge_index=None), TypeError, "cannot read a types.SimpleNamespace"),
    "negative id": (lambda: torch.tensor([[0], [-1]]), ValueError, "dst holds -1 at 0"),
    "negative entry": (lambda: -torch.eye(2).to_sparse(), ValueError, "weights holds -1.0 at 0"),
}


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("as_graph")
@pytest.mark.parametrize("case", BAD_OBJECTS)
@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support:UserWarning")
def test_an_object_that_is_no_graph_is_refused_with_its_cure(subject, case):
    make, error, message = BAD_OBJECTS[case]
    obj = make()
    with pytest.raises(error, match=message):
        subject(obj)
