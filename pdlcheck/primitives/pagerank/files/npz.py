"""The reader of a graph from arrays of numpy, or from a matrix that scipy saved."""

from __future__ import annotations

import errno
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import scipy.sparse as sp

from pdlcheck.primitives.pagerank.files.columns import Columns, Progress
from pdlcheck.primitives.pagerank.files.source import Source
from pdlcheck.primitives.pagerank.graph import Graph, ids_of, largest_id
from pdlcheck.primitives.pagerank.memory import require_free_memory

__all__ = ["read_npz"]


def read_npz(source: Source, weights: bool | None, progress: Progress | None) -> tuple[Graph | Columns, int | None]:
    """Return the graph of a matrix, or else the columns of edges and the number in the array ``num_nodes``.

    Raises:
        ValueError, TypeError: the arrays are no edges, or the matrix is malformed.
        MemoryError: the arrays do not fit in memory.
    """
    with source.seekable() as file:
        return _read(file, source, weights, progress)


def _read(
    file: Path | IO[bytes], source: Source, weights: bool | None, progress: Progress | None
) -> tuple[Graph | Columns, int | None]:
    total = source.total
    try:
        with zipfile.ZipFile(file) as archive:
            nbytes = sum(member.file_size for member in archive.infolist())
        require_free_memory(f"{source.name}: its arrays and the graph", 2 * nbytes, "use a machine with more memory")
        with np.load(file, allow_pickle=False) as arrays:
            names = set(arrays.files)
            if {"format", "shape"} <= names:
                if not isinstance(file, Path):
                    file.seek(0)
                graph = Graph.from_scipy(sp.load_npz(file))
                if weights is False and graph.weights is not None:
                    graph = Graph(graph.src, graph.dst, graph.num_nodes)
                return graph, None
            if not {"src", "dst"} <= names:
                raise ValueError(f"it must hold arrays src and dst, it holds {', '.join(sorted(names)) or 'none'}")
            if "weight" in names and "weights" not in names and weights is not False:
                raise ValueError("weights of edges are read from array weights, it holds weight; rename the array")
            wanted = {"src", "dst", "num_nodes"} | ({"weights"} if weights is not False else set())
            if weights and "weights" not in names:
                raise ValueError(f"weights are asked for, its arrays are {', '.join(sorted(names))}; add weights")
            found: dict[str, Any] = {}
            for name in sorted(names & wanted):
                found[name] = arrays[name]
                if not isinstance(found[name], np.ndarray):
                    raise ValueError(f"{name} is no array in numpy's format; write the file with numpy.savez")
                if progress is not None and total is not None:
                    progress(total * len(found) // len(names & wanted), total)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a place before the file
            raise
        raise ValueError(f"it cannot be unpacked: {error}; it may be truncated, get it again") from error
    except (MemoryError, TypeError, ValueError):
        raise
    except Exception as error:  # any error of numpy or scipy, which evaluate the headers of arrays
        how = "as numpy.savez and scipy.sparse.save_npz write them"
        raise ValueError(f"it holds no arrays {how}: {error}; write it again") from error
    num_nodes = _whole_number("num_nodes", found["num_nodes"]) if "num_nodes" in found else None
    return _columns(found), num_nodes


def _columns(found: dict[str, Any]) -> Columns:
    src, dst = found["src"], found["dst"]
    if src.ndim == dst.ndim == 1 and src.dtype.kind == dst.dtype.kind == "U":
        names, places = np.unique(np.concatenate([src, dst]), return_inverse=True)
        ends = places[: len(src)], places[len(src) :]
        return Columns(*ends, len(names) - 1, found.get("weights"), tuple(names.tolist()))
    src, dst = ids_of("src", src), ids_of("dst", dst)
    return Columns(src, dst, largest_id(src, dst), found.get("weights"))


def _whole_number(name: str, array: Any) -> int:
    if not isinstance(array, np.ndarray) or array.size != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be one whole number, got {array!r}; leave it out, or write it as such")
    return int(array.item())
