"""Reads a graph from a Matrix Market file, with scipy."""

from __future__ import annotations

import numpy as np
import scipy.io
import scipy.sparse as sp

from pdlcheck.primitives.pagerank.files.columns import Progress
from pdlcheck.primitives.pagerank.files.source import Source
from pdlcheck.primitives.pagerank.graph import Graph
from pdlcheck.primitives.pagerank.memory import graph_nbytes, require_free_memory, solver_nbytes
from pdlcheck.primitives.pagerank.node_ids import NodeIds

__all__ = ["read_matrix_market"]

FIRST_NBYTES = 1 << 16
ENTRY_NBYTES = 16  # of scipy's matrix


def read_matrix_market(source: Source, weights: bool | None, progress: Progress | None) -> tuple[Graph, bool, str]:
    """Return the graph in which entry (i, j) is the edge i -> j, whether it is symmetric, and a description.

    Rows count from 1. A symmetric matrix has both directions. A pattern has no weights.

    Raises:
        ValueError: no sparse square matrix, an entry that is wrong, negative or complex weights.
        MemoryError: the matrix does not fit in memory.
    """
    banner = _banner(source)
    form, field, symmetry = banner[2:5]
    if form != "coordinate":
        raise ValueError(f"it is a dense matrix ({form}), edges are entries of a sparse one; write it as coordinate")
    if field == "complex" or symmetry in ("skew-symmetric", "hermitian"):
        raise ValueError(f"its entries are {field} {symmetry}, weights are 0 or more; write their absolute values")
    if weights and field == "pattern":
        raise ValueError("it is a pattern, which has no weights; leave out --weights (weights=None)")
    file = source.seekable()
    try:
        matrix = sp.coo_array(scipy.io.mmread(file))
    except (ValueError, TypeError, OverflowError, EOFError) as error:
        raise ValueError(f"it is no valid Matrix Market file: {error}; it may be truncated, get it again") from error
    if progress is not None and source.total is not None:
        progress(source.total, source.total)
    values = None if field == "pattern" or weights is False or (matrix.data == 1).all() else matrix.data
    if values is not None and not (values >= 0).all():
        raise ValueError(
            f"an entry is {values[~(values >= 0)][0]}, a weight must be 0 or more; --no-weights (weights=False) leaves "
            "weights out"
        )
    size = matrix.shape[0]
    graph = Graph(matrix.row, matrix.col, size, values, NodeIds(np.arange(1, size + 1)))
    kept = "no weights" if graph.weights is None else "weights from its entries"
    return graph, symmetry == "symmetric", f"Matrix Market {form} {field} {symmetry}, rows count from 1, {kept}"


def _banner(source: Source) -> list[str]:
    """The words of the first line; the sizes below it are compared with the memory that is free."""
    lines = source.peek(FIRST_NBYTES).decode("latin-1").splitlines() or [""]
    banner = lines[0].lower().split()
    if len(banner) != 5 or banner[:2] != ["%%matrixmarket", "matrix"]:
        raise ValueError(
            f"its first line must be `%%MatrixMarket matrix coordinate FIELD SYMMETRY`, it is {lines[0][:60]!r}"
        )
    sizes = next((line.split() for line in lines[1:] if line.strip() and not line.startswith("%")), [])
    if banner[2] == "coordinate" and len(sizes) == 3 and all(size.isdecimal() for size in sizes):
        rows, columns, entries = map(int, sizes)
        if rows != columns:
            raise ValueError(f"graph: an adjacency matrix must be square, got shape ({rows}, {columns})")
        edges = entries * (1 if banner[4] == "general" else 2)
        nbytes = edges * ENTRY_NBYTES + graph_nbytes(edges, weighted=True) + solver_nbytes(rows, edges, weighted=True)
        what = f"ranking {edges} edges between {rows} nodes"
        require_free_memory(what, nbytes, "use a machine with more memory")
    return banner
