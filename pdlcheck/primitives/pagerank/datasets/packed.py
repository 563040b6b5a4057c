"""The real graphs that come with the package, and the format of their files."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.graph import Graph

__all__ = ["DEBIAN", "WORDNET", "debian_dependencies", "pack", "wordnet_pointers"]

DEBIAN = "debian_bookworm.npz"
WORDNET = "wordnet_3_0.npz"


def debian_dependencies() -> Graph:
    """Return the graph of the packages of Debian 12 (bookworm, main, amd64) and their dependencies.

    Nodes are named by package. An edge ``a -> b`` means that b can satisfy an item of a's Depends or Pre-Depends.
    ``ci/derive_debian_graph.py`` has the rules, and derives the file again. The copy in the package is pinned, so
    scores do not change.

    Example:
        >>> debian_dependencies().num_nodes > 60_000
        True
    """
    return _unpack(DEBIAN)


def wordnet_pointers() -> Graph:
    """Return the graph of the synsets of WordNet 3.0 and the pointers between them.

    A synset is named like ``dog.n.01``: its first word, its type (n, v, a, s, r), and the number of this sense of the
    word. There is an edge ``a -> b`` for each pointer of a's entry, of any kind (hypernym, antonym, derivation, ...),
    between words or between whole synsets. So some edges occur several times, and there are self-loops.
    ``ci/derive_wordnet_graph.py`` derives the file again; the licence is beside it, in ``wordnet_3_0.LICENSE``.

    Example:
        >>> wordnet_pointers()
        Graph(num_nodes=117659, num_edges=377592, weighted=False)

    Source: G. A. Miller, "WordNet: A Lexical Database for English", Commun. ACM 38 (1995). WordNet 3.0 Copyright 2006
    by Princeton University. All rights reserved.
    """
    return _unpack(WORDNET)


def pack(graph: Graph) -> dict[str, NDArray[Any]]:
    """Return the arrays of a packaged file: out-degrees, gaps between a node's sorted targets, and the names."""
    order = np.lexsort((graph.dst, graph.src))
    src, dst = graph.src[order], graph.dst[order]
    degree = np.bincount(src, minlength=graph.num_nodes)
    first = (np.cumsum(degree) - degree)[degree > 0]
    gaps = np.diff(dst, prepend=0)
    gaps[first] = dst[first]
    names = np.frombuffer("\n".join(map(str, graph.names or ())).encode("ascii"), np.uint8)
    return {"names": names, "out_degree": degree.astype(np.uint16), "dst_gaps": gaps.astype(np.uint32)}


def _unpack(name: str) -> Graph:
    path = files("pdlcheck.primitives.pagerank.datasets").joinpath(name)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as packed:
        names = tuple(packed["names"].tobytes().decode("ascii").split("\n"))
        degree = packed["out_degree"].astype(np.int64)
        gaps = packed["dst_gaps"].astype(np.int64)
    src = np.repeat(np.arange(len(names)), degree)
    total = np.cumsum(gaps)
    before = np.concatenate([[0], total])[np.cumsum(degree) - degree]  # the running sum where each node starts
    return Graph(src, total - np.repeat(before, degree), len(names), names=names)
