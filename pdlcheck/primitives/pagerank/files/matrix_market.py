"""The reader of Matrix Market files: below the sizes, entries are lines of text as in other files of edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdlcheck.primitives.pagerank.files.columns import Progress
from pdlcheck.primitives.pagerank.files.headings import Heading
from pdlcheck.primitives.pagerank.files.layout import LONGEST_HEADING, TextLayout
from pdlcheck.primitives.pagerank.files.source import Source
from pdlcheck.primitives.pagerank.files.text import read_integers, shown
from pdlcheck.primitives.pagerank.graph import Graph
from pdlcheck.primitives.pagerank.memory import graph_nbytes, require_free_memory, solver_nbytes
from pdlcheck.primitives.pagerank.node_ids import NodeIds

__all__ = ["read_matrix_market"]

FIELDS = ("real", "integer", "pattern", "double", "unsigned-integer")


@dataclass(frozen=True)
class _Sizes:
    rows: int
    entries: int
    begin: int  # the byte of the first entry
    line: int  # the number of the line of sizes


def read_matrix_market(source: Source, weights: bool | None, progress: Progress | None) -> tuple[Graph, bool, str]:
    """Return the graph, whether the matrix is symmetric, and a description. Entry (i, j) is the edge i -> j.

    Rows count from 1. A symmetric matrix gives edges in both directions. A pattern has no weights.

    Raises:
        ValueError: the matrix is not sparse and square, an entry is wrong, weights are negative or complex, or there
            are more or fewer entries than the file says.
        MemoryError: the matrix does not fit in memory.
    """
    form, field, symmetry = _banner(source)
    if weights and field == "pattern":
        raise ValueError("it is a pattern, which has no weights; leave out --weights (weights=None)")
    sizes = _sizes(source, symmetry)
    width = 2 if field == "pattern" else 3
    weight = 2 if width == 3 and weights is not False else -1
    layout = TextLayout(None, width, 0, 1, weight, sizes.begin, sizes.line, True, False, Heading())
    columns = read_integers(source, layout, strict=True, progress=progress)
    if len(columns.src) != sizes.entries:
        raise ValueError(
            f"line {sizes.line} says {sizes.entries} entries, the file has {len(columns.src)}; it may be truncated, "
            "get it again"
        )
    src, dst = columns.src - 1, columns.dst - 1
    for ids in (src, dst):
        if len(ids) and not (ids.min() >= 0 and ids.max() < sizes.rows):
            at = int(np.flatnonzero((ids < 0) | (ids >= sizes.rows))[0])
            raise ValueError(
                f"entry {at + 1} is in row {src[at] + 1} and column {dst[at] + 1}, both must be from 1 to "
                f"{sizes.rows}; correct it"
            )
    values = columns.weights
    if values is not None and (values == 1).all():
        values = None
    if symmetry == "symmetric":
        back = src != dst
        src, dst = np.concatenate([src, dst[back]]), np.concatenate([dst, src[back]])
        values = None if values is None else np.concatenate([values, values[back]])
    graph = Graph(src, dst, sizes.rows, values, NodeIds(np.arange(1, sizes.rows + 1)))
    kept = "no weights" if graph.weights is None else "weights from its entries"
    return graph, symmetry == "symmetric", f"Matrix Market {form} {field} {symmetry}, rows count from 1, {kept}"


def _banner(source: Source) -> tuple[str, str, str]:
    """Return form, field and symmetry; raise ValueError if they do not describe edges."""
    first = source.peek(1 << 10).split(b"\n", 1)[0]
    words = first.decode("latin-1").lower().split()
    if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
        raise ValueError(
            f"its first line must be `%%MatrixMarket matrix coordinate FIELD SYMMETRY`, it is {shown(first)}"
        )
    form, field, symmetry = words[2:]
    if form != "coordinate":
        raise ValueError(f"it is a dense matrix ({form}), edges are entries of a sparse one; write it as coordinate")
    if field == "complex" or symmetry in ("skew-symmetric", "hermitian"):
        raise ValueError(f"its entries are {field} {symmetry}, weights are 0 or more; write their absolute values")
    if field not in FIELDS or symmetry not in ("general", "symmetric"):
        raise ValueError(
            f"its entries are {field} {symmetry}, they must be real, integer or pattern, and general or symmetric"
        )
    return form, field, symmetry


def _sizes(source: Source, symmetry: str) -> _Sizes:
    """Return the numbers of the line `rows columns entries`.

    Raises:
        ValueError: the line is wrong, or the matrix is not square or has no rows.
        MemoryError: the matrix does not fit in the free memory.
    """
    number, begin, line = _first_line(source)
    words = line.split()
    if len(words) != 3 or not all(word.isdigit() and len(word) < 20 for word in words):
        raise ValueError(f"line {number} must be `rows columns entries`, it is {shown(line)}; correct it")
    rows, columns, entries = map(int, words)
    if rows != columns:
        raise ValueError(f"graph: an adjacency matrix must be square, got shape ({rows}, {columns})")
    if rows == 0:
        raise ValueError("it has no rows, so the graph has no nodes; get it again")
    edges = entries * (1 if symmetry == "general" else 2)
    nbytes = 2 * graph_nbytes(edges, weighted=True) + solver_nbytes(rows, edges, weighted=True)
    require_free_memory(f"ranking {edges} edges between {rows} nodes", nbytes, "use a machine with more memory")
    return _Sizes(rows, entries, begin, number)


def _first_line(source: Source) -> tuple[int, int, bytes]:
    """Return number, end and text of the first line that is neither empty nor a comment."""
    nbytes = 1 << 16
    while True:
        sample = source.peek(nbytes)
        ends = len(sample) < nbytes
        begin = number = 0
        for line in sample.split(b"\n")[: None if ends else -1]:
            number, begin = number + 1, begin + len(line) + 1
            if line.strip() and not line.lstrip().startswith(b"%"):
                return number, min(begin, len(sample)), line
        if ends or nbytes >= LONGEST_HEADING:
            raise ValueError("it has no line `rows columns entries`; it may be truncated, get it again")
        nbytes *= 4
