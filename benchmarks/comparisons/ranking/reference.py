"""The graphs of the benchmark, and the reference ranks for every error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pdlcheck.checks.pagerank.oracle import MAX_DENSE_NODES, Oracle
from pdlcheck.primitives.pagerank import (
    Graph,
    debian_dependencies,
    document_graph,
    pagerank,
    rmat,
    torch_headers,
    uniform,
    wordnet_pointers,
)

__all__ = ["GRAPHS", "write"]

DAMPING = 0.85
GRAPHS: Mapping[str, Callable[[], Graph]] = {
    "uni": uniform,
    "rmat": rmat,
    "debian": debian_dependencies,
    "wordnet": wordnet_pointers,
    "headers": torch_headers,
    "er10": document_graph,
    "small": lambda: uniform(2000, 20_000),
}


def write(name: str, folder: Path) -> dict[str, Any]:
    """Write src.npy and dst.npy, int64, and reference.npy, the ranks; return the graph's size and the error bound.

    Up to 3000 nodes the ranks are the dense solution. Above, they are ours at tol=1e-12, and the bound on their error
    does not depend on our code. It is the change of the ranks in one serial float64 round of the equation by numpy,
    over 1 - damping, plus the rounding of that round.
    """
    graph = GRAPHS[name]()
    oracle = Oracle.of(graph, DAMPING)
    if graph.num_nodes <= MAX_DENSE_NODES:
        scores, bound = oracle.solve(), (graph.num_nodes + 8) * 2.3e-16 / (1 - DAMPING)
    else:
        scores = pagerank(graph, damping=DAMPING, tol=1e-12).scores
        moved = float(np.abs(oracle.step(scores) - scores).sum()) / (1 - DAMPING)
        bound = moved + oracle.rounding(scores, np.dtype(np.float64))
    for array, ids in (("src", graph.src), ("dst", graph.dst)):
        np.save(folder / f"{array}.npy", ids.astype(np.int64))
    np.save(folder / "reference.npy", scores)
    sizes = {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "dangling": int(graph.dangling.sum())}
    return {"graph": name, **sizes, "reference_error_bound": bound}
