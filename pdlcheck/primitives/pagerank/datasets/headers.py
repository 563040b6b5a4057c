"""Which header includes which, read from the files themselves."""

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
    """The C++ headers of the installed torch and their ``#include`` lines; about 10 000 nodes, other in each version.

    Nodes are named by their path below ``torch/include``.

    Example:
        >>> torch_headers().num_nodes > 1000
        True
    """
    root = Path(torch.__file__).parent / "include"
    return include_graph(root, [root, root / "torch" / "csrc" / "api" / "include"])


def include_graph(folder: Path, search: Sequence[Path] = ()) -> Graph:
    """The headers below ``folder``, named by their path in it and sorted; an edge for each ``#include`` line.

    A quoted name is looked for beside the file that includes it, then in ``search`` in order; one in angle brackets
    only there; what is not found below ``folder`` is dropped. Lines count whatever ``#if`` they stand under, so a
    file that includes another twice has two edges.

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
