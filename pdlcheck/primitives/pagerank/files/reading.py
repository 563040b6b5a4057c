"""The reader of a graph from a file of edges; the first bytes and the suffix of the file select the format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from pdlcheck.primitives.pagerank.files.column_names import Choice
from pdlcheck.primitives.pagerank.files.columns import Columns, Progress
from pdlcheck.primitives.pagerank.files.headings import KONECT
from pdlcheck.primitives.pagerank.files.layout import find_layout
from pdlcheck.primitives.pagerank.files.matrix_market import read_matrix_market
from pdlcheck.primitives.pagerank.files.metis import read_metis
from pdlcheck.primitives.pagerank.files.npz import read_npz
from pdlcheck.primitives.pagerank.files.numbering import number_nodes
from pdlcheck.primitives.pagerank.files.rows import read_rows
from pdlcheck.primitives.pagerank.files.source import Source, open_source
from pdlcheck.primitives.pagerank.files.text import read_integers
from pdlcheck.primitives.pagerank.graph import Graph
from pdlcheck.primitives.pagerank.memory import graph_nbytes, require_free_memory, solver_nbytes

__all__ = ["FORMATS", "EdgeFile", "read_edge_file", "read_edges"]

Edges = str | os.PathLike[str] | IO[bytes]
FORMATS = ("konect", "matrix-market", "metis", "npz", "parquet", "text")
OPTIONS = {  # of each format, in addition to undirected
    "konect": {"columns", "delimiter", "header", "names", "weights", "num_nodes"},
    "matrix-market": {"weights"},
    "metis": {"weights"},
    "npz": {"weights", "num_nodes"},
    "parquet": {"columns", "names", "weights", "num_nodes"},
    "text": {"columns", "delimiter", "header", "names", "weights", "num_nodes"},
}
SUFFIXES = {".npz": "npz", ".parquet": "parquet", ".pq": "parquet", ".mtx": "matrix-market"}
SUFFIXES |= {".graph": "metis", ".metis": "metis"}
NOT_READ = {  # the first bytes of files that are not text: their format, and how to make them readable
    b"\xff\xfe": ("text in UTF-16", "convert it to UTF-8 with iconv"),
    b"\xfe\xff": ("text in UTF-16", "convert it to UTF-8 with iconv"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it with 7z"),
    b"\x89HDF": ("HDF5", "write the edges as CSV or Parquet"),
    b"ARROW1": ("Arrow IPC", "write the edges as CSV or Parquet"),
}
LOOKED_AT = 1 << 12
FEW = 1000


@dataclass(frozen=True, eq=False)
class EdgeFile:
    """A graph that was read, a description of its file, and notes on surprising facts."""

    graph: Graph
    description: str
    notes: tuple[str, ...] = ()
    undirected: bool = False  # if so, each edge already goes both ways


def read_edges(
    path: Edges,
    *,
    format: str | None = None,
    columns: Sequence[str | int] | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    names: bool = False,
    weights: bool | None = None,
    undirected: bool = False,
    num_nodes: int | None = None,
    progress: Progress | None = None,
) -> Graph:
    r"""Return the :class:`Graph` of a file of edges. Node ids may be integers or strings.

    ==================  ===============================================================================================
    format              content
    ==================  ===============================================================================================
    ``text``            a line is ``src dst`` or ``src dst weight``, between blanks, tabs, commas, semicolons or ``|``;
                        quotes as in CSV; empty lines and those that begin with ``#`` or ``%`` are skipped
    ``konect``          text whose first line is like ``% asym positive``; ``sym`` gives edges in both directions
    ``matrix-market``   entry (i, j) is the edge i -> j, rows count from 1
    ``metis``           line i lists the neighbours of node i, from 1
    ``npz``             arrays ``src``, ``dst``, perhaps ``weights`` and ``num_nodes``; or a matrix that
                        ``scipy.sparse.save_npz`` wrote, where entry (i, j) is the edge i -> j
    ``parquet``         two columns of ids and perhaps one of weights; needs ``pip install pdlcheck[parquet]``
    ==================  ===============================================================================================

    Each may be compressed by gzip, bzip2, xz or zstd (``pip install pdlcheck[zstd]`` before Python 3.14).

    If both ids of the first edge are whole numbers, all ids must be. The nodes are then those that have an edge, in
    order of id. If their ids are not exactly the numbers from 0, ``graph.names`` holds the ids. Otherwise ids are
    strings, nodes are in order of their first edge, and ``graph.names`` holds the strings. Matrix Market and METIS
    files contain the number of nodes.

    All edges have a weight, or none has. A third column is a weight if its name means weight, or if it holds fractions.
    Whole numbers may be times or counts. They raise an error unless ``weights`` or ``columns`` decides what they are.
    Lines of integers are parsed on two threads; in addition to the graph they take a few blocks of 4 MB.

    Args:
        path: a path, or a binary stream such as ``sys.stdin.buffer``.
        format: one of those above; ``None`` finds it from the first bytes, or else from the suffix.
        columns: both ends of an edge and perhaps its weight, as names of the header or numbers from 1.
        delimiter: one character between fields; ``None`` finds it in the first lines.
        header: whether the first line holds names of columns; ``None`` finds it from the first lines.
        names: read ids as strings, even if they are numbers.
        weights: whether the file's weights are read; ``None`` as above.
        undirected: each edge goes both ways, a self-loop once; also if the file says so (KONECT, SNAP).
        num_nodes: nodes are the numbers below it, with or without edges. ``None`` ranks the nodes that have edges.
        progress: called now and then with the bytes of the file that have been read, and with all of them.

    Raises:
        ValueError: a line, array or column is wrong; the message has the file, the place in it, and the cure. Or the
            file has no edges, or arguments contradict it.
        MemoryError: the graph cannot fit; raised before it is allocated, with the file and the bytes that it needs.
        OSError: the file cannot be opened or read.
        ImportError: a library that the format needs is missing.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "edges.txt")
        ...     _ = file.write_text("# a triangle\n3 4\n4 7\n7 3\n")
        ...     graph = read_edges(file)
        >>> graph, list(graph.names)
        (Graph(num_nodes=3, num_edges=3, weighted=False), [3, 4, 7])
    """
    chosen = None if columns is None else tuple(columns)
    choice = Choice(chosen, delimiter, header, names, weights)
    return read_edge_file(
        path, choice, format=format, undirected=undirected, num_nodes=num_nodes, progress=progress
    ).graph


def read_edge_file(
    path: Edges,
    choice: Choice,
    *,
    format: str | None = None,
    undirected: bool = False,
    num_nodes: int | None = None,
    progress: Progress | None = None,
) -> EdgeFile:
    """Return the graph of :func:`read_edges`, with a description. Arguments and errors are the same."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    with open_source(path) as source:
        if source.total == 0:
            raise ValueError(f"{source.name} is empty, 0 bytes; get the file again")
        found = format or _format_of(source)
        _require_options(source.name, found, choice, num_nodes)
        with _named(source.name):
            read = _read(source, found, format, choice, num_nodes, progress)
            graph = _both_ways(read.graph) if undirected and not read.undirected else read.graph
    said = ", undirected: each edge both ways" if undirected or read.undirected else ""
    return EdgeFile(graph, f"{Path(source.name).name}: {read.description}{said}", read.notes)


def _read(
    source: Source, found: str, asked: str | None, choice: Choice, num_nodes: int | None, progress: Progress | None
) -> EdgeFile:
    if found == "npz":
        arrays, own_size = read_npz(source, choice.weights, progress)
        if isinstance(arrays, Graph):
            return EdgeFile(arrays, "sparse matrix of scipy")
        return _graph_of(source.name, arrays, own_size if num_nodes is None else num_nodes, "arrays src and dst")
    if found == "matrix-market":
        graph, symmetric, description = read_matrix_market(source, choice.weights, progress)
        return EdgeFile(graph, description, undirected=symmetric)
    if found == "metis":
        columns, description = read_metis(source, choice.weights, progress)
        return replace(_graph_of(source.name, columns, None, description), undirected=True)
    if found == "parquet":
        from pdlcheck.primitives.pagerank.files.parquet import read_parquet  # pyarrow is optional

        columns, description = read_parquet(source, choice, progress)
        return _graph_of(source.name, columns, num_nodes, description)
    layout = find_layout(source, choice, plain_text=asked == "text")
    if layout is None:
        nobody = np.empty(0, np.int64)
        return _graph_of(source.name, Columns(nobody, nobody, -1, None), num_nodes, "text without an edge")
    if asked == "konect" and layout.heading.kind != "KONECT":
        raise ValueError("the first line of KONECT is `% sym|asym|bip WEIGHTS`, here it is another; pass --format text")
    read = read_integers if layout.integers and not layout.quoted else read_rows
    columns = read(source, layout, strict=choice.columns is None, progress=progress)
    one_way = len(columns.src)
    whole = _graph_of(source.name, columns, num_nodes, layout.describe())
    notes = list(whole.notes)
    said = layout.heading
    if said.num_edges is not None and said.num_edges != one_way:
        notes.append(f"its first lines say {said.num_edges} edges, it has {one_way}; it may be truncated")
    graph = _both_ways(whole.graph) if said.undirected else whole.graph
    return EdgeFile(graph, whole.description, tuple(notes), said.undirected)


def _format_of(source: Source) -> str:
    begin = source.peek(LOOKED_AT)
    if begin.startswith(b"PAR1"):
        return "parquet"
    if begin.startswith(b"PK\x03\x04") and b".npy" in begin[:300]:
        return "npz"
    if source.suffix in (".npz", ".parquet", ".pq"):
        return SUFFIXES[source.suffix]
    if begin.startswith(b"%%MatrixMarket"):
        return "matrix-market"
    for first, (what, cure) in NOT_READ.items():
        if begin.startswith(first):
            raise ValueError(f"{source.name} is {what}, not a file of edges; {cure}")
    if begin[257:262] == b"ustar":
        raise ValueError(f"{source.name} is a tar archive; unpack it with tar -xf, and read the file of edges in it")
    if b"\0" in begin:
        where = begin.index(b"\0")
        raise ValueError(f"{source.name} is no text: byte {where} is 0; give the file of edges, or pass --format")
    if KONECT.match(begin.decode("latin-1").split("\n", 1)[0].strip()):
        return "konect"
    return SUFFIXES.get(source.suffix, "text")


def _require_options(name: str, found: str, choice: Choice, num_nodes: int | None) -> None:
    given = {
        "columns": choice.columns is not None,
        "delimiter": choice.delimiter is not None,
        "header": choice.header is not None,
        "names": choice.names,
        "weights": choice.weights is not None,
        "num_nodes": num_nodes is not None,
    }
    wrong = [option for option, there in given.items() if there and option not in OPTIONS[found]]
    if wrong:
        raise ValueError(f"{name} is read as {found}, which takes no {wrong[0]}; leave it out, or pass --format")


def _graph_of(name: str, columns: Columns, num_nodes: int | None, description: str) -> EdgeFile:
    """Return the graph of columns, with nodes numbered from 0; raise MemoryError if it does not fit in free memory."""
    edges, weighted = len(columns.src), columns.weights is not None
    if columns.names is not None and num_nodes is not None:
        raise ValueError(f"num_nodes is {num_nodes}, but ids are names; leave out --num-nodes (num_nodes=None)")
    if num_nodes is None and edges == 0 and not columns.names:
        raise ValueError(
            "it holds no edge; an edge is a line `src dst`, get the file again, or pass --num-nodes for nodes alone"
        )
    src, dst, notes = columns.src, columns.dst, []
    names: Sequence[Any] | None = columns.names
    size = num_nodes
    if size is None and names is not None:
        size = len(names)
    elif size is None:
        src, dst = (_own(ids) for ids in (src, dst))
        for end, ids in (("src", src), ("dst", dst)):
            if ids.size and ids.min() < 0:
                at = int(ids.argmin())
                raise ValueError(f"{end} holds {ids[at]} at {at}, ids must be 0 or more; correct it")
        ids = number_nodes(src, dst, columns.largest, name)
        size = columns.largest + 1 if ids is None else len(ids)
        names = ids
        if ids is not None:
            span = columns.largest + 1
            cure = f"; --num-nodes {span} ranks them too" if span <= FEW + 10 * size else ""
            are = "has no edge and is no node" if span - size == 1 else "have no edge and are no nodes"
            notes.append(f"{span - size} of the ids from 0 to {span - 1} {are}{cure}")
    nbytes = solver_nbytes(size, edges, weighted=weighted) + graph_nbytes(edges, weighted=weighted)
    cure = "number the nodes from 0 without large gaps" if num_nodes is not None else "use a machine with more memory"
    require_free_memory(f"{name}: ranking {edges} edges between {size} nodes", nbytes, cure)
    return EdgeFile(Graph(src, dst, size, columns.weights, names), description, tuple(notes))


def _own(ids: Any) -> Any:
    """Return ids that can be replaced in place: int32 or int64."""
    kept = ids.dtype in (np.int32, np.int64) and ids.flags.writeable and ids.flags.c_contiguous
    return ids if kept else ids.astype(np.int64)


def _both_ways(graph: Graph) -> Graph:
    """Return the graph with each edge in both directions; a self-loop stays one edge."""
    edges = 2 * graph.num_edges
    nbytes = 2 * graph_nbytes(edges, weighted=graph.weights is not None)
    require_free_memory(f"{edges} edges, each both ways", nbytes, "use a machine with more memory")
    back = graph.src != graph.dst
    src, dst = np.concatenate([graph.src, graph.dst[back]]), np.concatenate([graph.dst, graph.src[back]])
    weights = None if graph.weights is None else np.concatenate([graph.weights, graph.weights[back]])
    return Graph(src, dst, graph.num_nodes, weights, graph.names)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the name of the file before the message of each error that does not begin with it."""
    try:
        yield
    except (MemoryError, TypeError, ValueError) as error:
        if re.match(re.escape(name) + r"(:| )", str(error)):
            raise
        # some of numpy's error types take other arguments
        kind = next(kind for kind in (MemoryError, TypeError, ValueError) if isinstance(error, kind))
        raise kind(f"{name}: {error}") from error
