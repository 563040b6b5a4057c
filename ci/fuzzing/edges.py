"""Fuzz targets of edge files in each format, compressed or not: a valid graph, or an error that names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from fuzzing.mutations import mutated
from fuzzing.target import Target, corpus_of, require
from pdlcheck.primitives.pagerank import Graph, pagerank, read_edges

__all__ = ["TARGETS"]

_FEW = 10_000  # most nodes and edges that are ranked
_WORDS = {
    "text": b'# % , ; | " src dst weight source target +1 \xef\xbb\xbf \r\n \t \xff'.split(b" "),
    "konect": b"% sym asym bip unweighted positive signed".split(b" "),
    "matrix-market": b"%%MatrixMarket matrix coordinate array real integer pattern complex general symmetric".split(),
    "metis": b"% 000 001 010 011 100 111".split(b" "),
}


def _check(path: Path) -> None:
    try:
        graph = read_edges(path)
    except (MemoryError, ValueError, TypeError) as error:
        # exact type: a subclass such as UnicodeDecodeError comes from Python, so its message is not the project's
        require(type(error) in (MemoryError, ValueError, TypeError), f"{type(error).__name__} is raised: {error}")
        require(str(path) in str(error), f"the error does not name the file: {error}")
        return
    _require_edges(graph)
    if graph.num_nodes + graph.num_edges <= _FEW:
        scores = pagerank(graph).scores
        total = float(scores.sum())
        require(bool(np.isfinite(scores).all()) and abs(total - 1) < 1e-6, f"the scores of {graph} sum to {total}")


def _require_edges(graph: Graph) -> None:
    require(graph.num_nodes >= 1, f"{graph} has no nodes")
    require(len(graph.src) == len(graph.dst) == graph.num_edges, f"{graph} has ends of different lengths")
    for ids in (graph.src, graph.dst):
        if len(ids):
            require(ids.min() >= 0 and ids.max() < graph.num_nodes, f"{graph} has an id outside: {ids.tolist()[:20]}")
    if graph.weights is not None:
        good = len(graph.weights) == graph.num_edges and np.isfinite(graph.weights).all() and (graph.weights >= 0).all()
        require(bool(good), f"{graph} has weights {graph.weights.tolist()[:20]}")
    if graph.names is not None:
        require(len(graph.names) == graph.num_nodes, f"{graph} has {len(graph.names)} names")


def _members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def _zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _arrays() -> st.SearchStrategy[bytes]:
    """Return intact archives whose arrays are damaged: their members are edited and packed again."""
    kept = [_members(data) for data in corpus_of("npz") if zipfile.is_zipfile(io.BytesIO(data))]
    everything = [data for members in kept for data in members.values()]
    shapes = [{name: mutated([data, data, data, *everything]) for name, data in members.items()} for members in kept]
    return st.one_of([st.fixed_dictionaries(shape) for shape in shapes]).map(_zipped)


def _packed() -> st.SearchStrategy[bytes]:
    texts = [data for name in ("text", "matrix-market", "npz") for data in corpus_of(name)]
    packers = [gzip.compress, bz2.compress, lzma.compress]
    if find_spec("zstandard"):
        packers.append(import_module("zstandard").compress)
    packed = st.builds(lambda pack, data: pack(data), st.sampled_from(packers), mutated(texts))
    return packed | mutated(corpus_of("packed"))


TARGETS = [
    *(Target(name, mutated(corpus_of(name), words), _check) for name, words in _WORDS.items() if name != "metis"),
    Target("metis", mutated(corpus_of("metis"), _WORDS["metis"]), _check, ".graph"),
    Target("npz", mutated(corpus_of("npz")) | _arrays(), _check, ".npz"),
    Target("parquet", mutated(corpus_of("parquet")), _check, ".parquet"),
    Target("packed", _packed(), _check),
]
