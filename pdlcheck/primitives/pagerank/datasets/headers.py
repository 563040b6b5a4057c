"""The graph of headers that include each other, read from the files themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path

import numpy as np
import torch

from pdlcheck.primitives.pagerank.graph import Graph

__all__ = ["include_graph", "torch_headers"]

INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
SUFFIXES = {".cuh", ".h", ".hh", ".hpp", ".inl", ".inc"}


def torch_headers() -> Graph:
    """Return the graph of the C++ headers of the installed torch and their ``#include`` lines.

    It has about 10 000 nodes and differs between versions of torch. Nodes are named by their path below
    ``torch/include``.

    Example:
        >>> torch_headers().num_nodes > 1000
        True
    """
    root = Path(torch.__file__).parent / "include"
    return include_graph(root, [root, root / "torch" / "csrc" / "api" / "include"])


def include_graph(folder: Path, search: Sequence[Path] = ()) -> Graph:
    """Return the graph of the headers below ``folder``, with an edge for each ``#include`` line.

    Nodes are named by their path in ``folder``, and sorted. A quoted name is looked up beside the file that includes
    it, then in ``search`` in order; a name in angle brackets only in ``search``. A header that is not found below
    ``folder`` is dropped. A line counts under any ``#if``, so a file that includes another twice has two edges.

    Raises:
        ValueError: ``folder`` holds no header.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    if not files:
        raise ValueError(f"folder {folder} holds no header; they end in {', '.join(sorted(SUFFIXES))}")
    names = tuple(path.relative_to(folder).as_posix() for path in files)
    index = {normpath(str(path)): i for i, path in enumerate(files)}
    src, dst = [], []
    for i, path in enumerate(files):
        for quoted, bracketed in INCLUDE.findall(path.read_bytes()):
            wanted = (quoted or bracketed).decode("utf-8", "replace")
            places = [path.parent, *search] if quoted else search
            found = (index.get(normpath(f"{place}/{wanted}")) for place in places)
            target = next((node for node in found if node is not None), None)
            if target is not None:
                src.append(i)
                dst.append(target)
    return Graph(np.array(src, np.int64), np.array(dst, np.int64), len(names), names=names)
