"""Graph objects of other libraries, each read as a :class:`Graph`."""

from __future__ import annotations

from typing import Any

import networkx as nx
import scipy.sparse as sp
import torch

from pdlcheck.compat.torch.tensors import sparse_parts
from pdlcheck.primitives.pagerank.graph import Graph

__all__ = ["as_graph"]

READABLE = (
    "a Graph, a networkx graph, a SciPy or torch sparse matrix, a DGL graph, a PyG Data, an edge_index (an integer "
    "tensor of two rows), or the edges as a tuple (src, dst) or (src, dst, weights)"
)


def as_graph(obj: Any) -> Graph:
    """Return the :class:`Graph` of an object of another library.

    =====================================  ============================================================================
    object                                 edges
    =====================================  ============================================================================
    ``Graph``                              itself
    tuple ``(src, dst[, weights])``        ``src[e] -> dst[e]``; two lists, arrays or tensors, never one of two rows
    integer tensor of shape (2, E)         ``edge_index`` as in PyG: row 0 is src, row 1 is dst, even if E is 2
    torch or SciPy sparse, square          entry (i, j) is i -> j and its value the weight; entries that repeat add
    networkx                               attribute ``weight``, 1 if it is missing; undirected edges in both directions
    DGL                                    homogeneous graphs, without weights
    PyG ``Data``                           its ``edge_index``, ``num_nodes``, and ``edge_weight`` if it has one
    =====================================  ============================================================================

    A dense matrix is not read, because it could contain edges or an adjacency. For tuples and an ``edge_index``,
    ``num_nodes`` is the largest id + 1. For another number, use :meth:`Graph.from_edges`:
    ``Graph.from_edges(*edge_index, num_nodes)``.

    Raises:
        TypeError: the object is none of these.
        ValueError: the edges do not make a graph (see :class:`Graph`).

    Example:
        >>> as_graph(torch.tensor([[0, 1], [1, 2]]))
        Graph(num_nodes=3, num_edges=2, weighted=False)
    """
    if isinstance(obj, Graph):
        return obj
    if isinstance(obj, nx.Graph):
        return Graph.from_networkx(obj)
    if sp.issparse(obj):
        return Graph.from_scipy(obj)
    if isinstance(obj, torch.Tensor):
        return _of_edge_index(obj) if obj.layout == torch.strided else _of_sparse_tensor(obj)
    if type(obj).__module__.split(".")[0] == "dgl":
        return Graph.from_dgl(obj)
    if isinstance(obj, tuple) and len(obj) in (2, 3):
        return Graph.from_edges(obj[0], obj[1], weights=obj[2] if len(obj) == 3 else None)
    if isinstance(getattr(obj, "edge_index", None), torch.Tensor):
        weights = getattr(obj, "edge_weight", None)
        return _of_edge_index(obj.edge_index, getattr(obj, "num_nodes", None), weights)
    raise TypeError(f"graph: cannot read a {type(obj).__module__}.{type(obj).__qualname__}; pass {READABLE}")


def _of_edge_index(edge_index: torch.Tensor, num_nodes: int | None = None, weights: Any = None) -> Graph:
    whole = not (edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool)
    if not whole or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise TypeError(
            f"graph: a dense tensor must be an edge_index, integers of shape (2, num_edges), got {edge_index.dtype} of "
            f"shape {tuple(edge_index.shape)}; pass edges as two rows, or an adjacency as matrix.to_sparse()"
        )
    return Graph.from_edges(edge_index[0], edge_index[1], num_nodes, weights)


def _of_sparse_tensor(matrix: torch.Tensor) -> Graph:
    matrix = matrix.detach().cpu()
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"graph: an adjacency matrix must be square, got shape {tuple(matrix.shape)}")
    if matrix.layout == torch.sparse_coo:
        (src, dst), weights = sparse_parts(matrix)
    elif matrix.layout == torch.sparse_csr:
        src, dst, weights = _expanded(matrix.crow_indices()), matrix.col_indices(), matrix.values()
    elif matrix.layout == torch.sparse_csc:
        src, dst, weights = matrix.row_indices(), _expanded(matrix.ccol_indices()), matrix.values()
    else:
        raise TypeError(f"graph: cannot read a tensor of layout {matrix.layout}; convert it with .to_sparse_csr()")
    if weights.ndim != 1:
        raise ValueError(
            f"graph: each entry of the matrix must be one number, got values of shape {tuple(weights.shape)}; "
            "make it a sparse matrix without dense dimensions"
        )
    return Graph.from_edges(src, dst, matrix.shape[0], None if bool((weights == 1).all()) else weights)


def _expanded(pointers: torch.Tensor) -> torch.Tensor:
    """Return for each entry its row (or column), from the places where the rows (or columns) begin."""
    return torch.repeat_interleave(torch.arange(len(pointers) - 1), pointers.diff())
