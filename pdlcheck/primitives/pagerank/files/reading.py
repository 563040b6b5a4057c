"""Reads a graph from a file of edges; the suffix of its name says how."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from pdlcheck.primitives.pagerank.files.columns import Progress
from pdlcheck.primitives.pagerank.files.text import read_text
from pdlcheck.primitives.pagerank.graph import Graph, ids_of, largest_id
from pdlcheck.primitives.pagerank.memory import require_free_memory, solver_nbytes

__all__ = ["read_edges"]


def read_edges(
    path: str | os.PathLike[str], *, num_nodes: int | None = None, progress: Progress | None = None
) -> Graph:
    """The :class:`Graph` of a file of edges.

    ==================  ===============================================================================================
    suffix              content
    ==================  ===============================================================================================
    ``.npz``            arrays ``src``, ``dst``, perhaps ``weights`` and ``num_nodes``; or what
                        ``scipy.sparse.save_npz`` wrote, where entry (i, j) is the edge i -> j
    ``.parquet``        columns ``src``, ``dst``, perhaps ``weight``; needs pyarrow: ``pip install pdlcheck[parquet]``
    any, any ``.gz``    text, perhaps gzipped: a line is ``src dst`` or ``src dst weight``, with blanks, tabs or commas
                        between; empty lines and those that begin with ``#`` or ``%`` are left out
    ==================  ===============================================================================================

    Nodes are whole numbers from 0; names must be numbered first (:func:`networkx.read_edgelist` reads them). All edges
    have a weight, or none has. Lines of text are parsed on two threads, beside the graph a few blocks of 4 MB are held.

    Args:
        num_nodes: ``None`` is what the file says, or else the largest id + 1.
        progress: called now and then with the bytes of the file that have been read, and with all of them.

    Raises:
        ValueError: a line, array or column that is wrong, with the file, where in it, and the cure.
        MemoryError: the graph cannot fit, before it is allocated, with the bytes that it needs.
        OSError: the file cannot be opened or read.
        ImportError: ``.parquet``, and pyarrow is missing.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder, "edges.txt")
        ...     _ = file.write_text("# a triangle\\n0 1\\n1 2\\n2 0\\n")
        ...     read_edges(file)
        Graph(num_nodes=3, num_edges=3, weighted=False)
    """
    path = Path(path)
    if path.is_fifo():
        raise ValueError(f"{path} is a pipe, of no known length; write what comes from it to a file, and read that")
    if path.suffix == ".npz":
        with _named(path):
            return _read_npz(path, num_nodes, progress)
    if path.suffix == ".parquet":
        from pdlcheck.primitives.pagerank.files.parquet import read_parquet

        columns = read_parquet(path, progress)
    else:
        columns = read_text(path, progress)
    with _named(path):
        return Graph(columns.src, columns.dst, columns.num_nodes if num_nodes is None else num_nodes, columns.weights)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors about arrays name the file too."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # some of numpy's take other arguments
        raise kind(f"{path}: {error}") from error


def _read_npz(path: Path, num_nodes: int | None, progress: Progress | None) -> Graph:
    total = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            nbytes = sum(member.file_size for member in archive.infolist())
        require_free_memory(f"{path}: its arrays and the graph", 2 * nbytes, "use a machine with more memory")
        with np.load(path, allow_pickle=False) as arrays:
            names = set(arrays.files)
            if {"format", "shape"} <= names:
                return Graph.from_scipy(sp.load_npz(path))
            if not {"src", "dst"} <= names:
                raise ValueError(f"it must hold arrays src and dst, it holds {', '.join(sorted(names)) or 'none'}")
            if "weight" in names and "weights" not in names:
                raise ValueError("weights of edges are read from array weights, it holds weight; rename the array")
            found: dict[str, Any] = {}
            for name in sorted(names & {"src", "dst", "weights", "num_nodes"}):
                found[name] = arrays[name]
                if progress is not None:
                    progress(total * len(found) // len(names), total)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise ValueError(f"it cannot be unpacked: {error}; it may be truncated, get it again") from error
    if num_nodes is None and "num_nodes" in found:
        num_nodes = _whole_number("num_nodes", found["num_nodes"])
    src, dst = (ids_of(name, found[name]) for name in ("src", "dst"))
    if num_nodes is None:
        num_nodes = 1 + largest_id(src, dst)
    what = f"{path}: ranking {len(src)} edges between {num_nodes} nodes"
    nbytes = solver_nbytes(num_nodes, len(src), weighted="weights" in found)
    require_free_memory(what, nbytes, "number the nodes from 0 without large gaps")
    return Graph(src, dst, num_nodes, found.get("weights"))


def _whole_number(name: str, array: Any) -> int:
    if not isinstance(array, np.ndarray) or array.size != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be one whole number, got {array!r}; leave it out, or write it as such")
    return int(array.item())
