"""PageRank as published in four versions: messages, sparse, dense, and dense with the degrees folded in.

All four run the same iteration a fixed number of times: ``pv <- (1 - d)/N + d (G (Out * pv) + m/N)``. ``G[j, i]`` is
the weight of the edges i -> j, ``Out[i]`` is 1 / (out-weight of i), and ``m`` is the sum of ``pv`` over dangling nodes.

The published versions have no ``m`` and need an out-edge at every node. Here each round spreads ``m`` uniformly. So
every version converges to the scores of :func:`pagerank_reference` on every graph, and the sum of ``pv`` stays 1. On a
graph without dangling nodes this costs nothing.

After ``iterations`` rounds the scores are within ``2 d**iterations`` of the exact scores, plus round-off. This is the
sum of absolute differences: 1.5e-14 for 200 rounds at 0.85.

Source: D. Gannon, "Doing Deep Learning in Parallel with PyTorch" (2020).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from pdlcheck.primitives.pagerank.arguments import (
    require_damping,
    require_device,
    require_iterations,
    require_memory,
)
from pdlcheck.primitives.pagerank.formats import as_graph
from pdlcheck.primitives.pagerank.graph import Graph
from pdlcheck.primitives.pagerank.memory import COO, CSR, DENSE, MESSAGES, Peak

__all__ = ["pagerank_v0", "pagerank_v1", "pagerank_v2", "pagerank_v3", "transition_matrix"]


def pagerank_v0(
    graph: Any,
    *,
    damping: float = 0.85,
    iterations: int = 200,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rank the nodes by messages: each node sends ``pv * Out`` along its out-edges and sums the arriving values.

    Needs DGL.

    Args:
        graph: any object that :func:`as_graph` reads.
        damping: d, in [0, 1).
        iterations: the number of rounds, 1 or more.
        device: the device of the iteration and of the scores.
        dtype: torch.float32 or torch.float64.

    Returns:
        One score per node, with sum 1, on ``device``; empty for a graph without nodes. A round costs ``num_edges``
        messages.

    Raises:
        ImportError: DGL is missing; the message names the extra.
        ValueError: an argument is wrong; the message names the cure.
        MemoryError: the edges do not fit in memory; raised before they are allocated.

    Example:
        >>> pagerank_v0(([0, 1], [1, 0]))
        tensor([0.5000, 0.5000], dtype=torch.float64)

    Source: see the module.
    """
    from pdlcheck.primitives.pagerank.dgl_v0 import message_passing  # DGL is optional

    graph, device = as_graph(graph), require_device(device, dtype)
    _require_room("pagerank_v0", MESSAGES, graph, device)
    out = _inverse_out_weights(graph, device, dtype)
    send = message_passing(graph, device, dtype)
    return _iterate(graph, lambda pv: send(pv * out), damping, iterations, device, dtype)


def pagerank_v1(
    graph: Any,
    *,
    damping: float = 0.85,
    iterations: int = 200,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    layout: Literal["csr", "coo"] = "csr",
) -> Tensor:
    """Rank the nodes by a sparse adjacency (row = destination, column = source) times ``pv * Out`` in the loop.

    ``layout`` is torch's sparse format: "coo" is the published one, and serial in torch; "csr" gives the same numbers
    30 to 130 times faster. The other arguments, the result and the errors are those of :func:`pagerank_v0`, but it does
    not need DGL. A round reads the ``num_edges`` weights and int32 ids once.

    Example:
        >>> pagerank_v1(([0, 1], [1, 0]))
        tensor([0.5000, 0.5000], dtype=torch.float64)

    Source: see the module.
    """
    if layout not in ("csr", "coo"):
        raise ValueError(f"layout must be 'csr' or 'coo', got {layout!r}")
    graph, device = as_graph(graph), require_device(device, dtype)
    _require_room("pagerank_v1", CSR if layout == "csr" else COO, graph, device)
    out = _inverse_out_weights(graph, device, dtype)
    adjacency = _sparse_adjacency(graph, layout).to(device, dtype)
    return _iterate(graph, lambda pv: adjacency @ (pv * out), damping, iterations, device, dtype)


def pagerank_v2(
    graph: Any,
    *,
    damping: float = 0.85,
    iterations: int = 200,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rank the nodes like :func:`pagerank_v1`, with the adjacency made dense before the loop.

    Except for ``layout``, the arguments, the result and the errors are the same. It also raises MemoryError if
    ``num_nodes**2`` numbers do not fit on ``device``. A round reads all of them, which is the work that a GPU does
    best.

    Example:
        >>> pagerank_v2(([0, 1], [1, 0]))
        tensor([0.5000, 0.5000], dtype=torch.float64)

    Source: see the module.
    """
    graph, device = as_graph(graph), require_device(device, dtype)
    adjacency = _dense_adjacency("pagerank_v2", graph, device, dtype)
    out = _inverse_out_weights(graph, device, dtype)
    return _iterate(graph, lambda pv: adjacency @ (pv * out), damping, iterations, device, dtype)


def pagerank_v3(
    graph: Any,
    *,
    damping: float = 0.85,
    iterations: int = 200,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    fold: Literal["scale", "matmul"] = "scale",
) -> Tensor:
    """Rank the nodes with a dense ``G @ diag(Out)``, folded before the loop; this saves a product of vectors per round.

    ``fold`` is the way to fold it: "matmul" multiplies two N x N matrices as published (O(N^3)); "scale" scales the
    columns (O(N^2)) and gives the same matrix. The other arguments, the result and the errors are those of
    :func:`pagerank_v2`.

    Example:
        >>> pagerank_v3(([0, 1], [1, 0]))
        tensor([0.5000, 0.5000], dtype=torch.float64)

    Source: see the module.
    """
    graph, device = as_graph(graph), require_device(device, dtype)
    folded = transition_matrix(graph, device=device, dtype=dtype, fold=fold)
    return _iterate(graph, lambda pv: folded @ pv, damping, iterations, device, dtype)


def transition_matrix(
    graph: Any,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    fold: Literal["scale", "matmul"] = "scale",
) -> Tensor:
    """Return ``G @ diag(Out)`` as a dense matrix.

    Column i is the distribution of node i's score over its successors: its sum is 1, or 0 if node i is dangling.

    Example:
        >>> transition_matrix(([0, 0], [1, 0])).tolist()
        [[0.5, 0.0], [0.5, 0.0]]
    """
    if fold not in ("scale", "matmul"):
        raise ValueError(f"fold must be 'scale' or 'matmul', got {fold!r}")
    graph, device = as_graph(graph), require_device(device, dtype)
    matrices = 3 if fold == "matmul" else 1  # the adjacency, the diagonal matrix and their product
    adjacency = _dense_adjacency("pagerank_v3", graph, device, dtype, matrices)
    out = _inverse_out_weights(graph, device, dtype)
    return adjacency @ torch.diag(out) if fold == "matmul" else adjacency.mul_(out)


def _iterate(
    graph: Graph,
    spread: Callable[[Tensor], Tensor],
    damping: float,
    iterations: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Run ``iterations`` rounds from the uniform vector; ``spread`` sends scores along the edges."""
    damping = require_damping(damping)
    iterations = require_iterations("iterations", iterations)
    n = graph.num_nodes
    pv = torch.full((n,), 1 / max(n, 1), dtype=dtype, device=device)
    if n == 0:
        return pv
    dangling = torch.from_numpy(np.flatnonzero(graph.dangling)).to(device)
    for _ in range(iterations):
        arrived = spread(pv)
        if len(dangling):
            arrived = arrived + pv[dangling].sum() / n
        pv = (1 - damping) / n + damping * arrived
    return pv


def _inverse_out_weights(graph: Graph, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ``Out``: 1 / out-weight per node, 0 for a dangling node."""
    total = np.bincount(graph.src, graph.scaled_weights(), graph.num_nodes)
    out = np.divide(1.0, total, out=np.zeros(graph.num_nodes), where=total > 0)
    return torch.from_numpy(out).to(device, dtype)


def _require_room(caller: str, peak: Peak, graph: Graph, device: torch.device) -> None:
    """Raise MemoryError if the edges do not fit on the host or on ``device``.

    They are laid out on the host, and copied to the device if it is another one.
    """
    for where in {"cpu", str(device)}:
        require_memory(caller, peak.nbytes(graph), where, what=str(graph), cure="use pagerank, or fewer edges")


def _sparse_adjacency(graph: Graph, layout: str) -> Tensor:
    size = (graph.num_nodes, graph.num_nodes)
    matrix = sp.csr_array((graph.scaled_weights(), (graph.dst, graph.src)), shape=size)  # duplicates add
    with warnings.catch_warnings():
        # torch warns every user once that CSR is in beta and that it trusts the ids, which scipy has just made
        warnings.filterwarnings("ignore", "Sparse (CSR tensor support|invariant checks)", UserWarning)
        if layout == "coo":
            coo = matrix.tocoo()
            ids = torch.from_numpy(np.stack([coo.row, coo.col]).astype(np.int64))
            return torch.sparse_coo_tensor(ids, torch.from_numpy(coo.data), size).coalesce()
        indptr, indices = torch.from_numpy(matrix.indptr), torch.from_numpy(matrix.indices)
        return torch.sparse_csr_tensor(indptr, indices, torch.from_numpy(matrix.data), size)


def _dense_adjacency(caller: str, graph: Graph, device: torch.device, dtype: torch.dtype, matrices: int = 1) -> Tensor:
    n = graph.num_nodes
    require_memory(caller, matrices * n * n * dtype.itemsize + DENSE.nbytes(graph), device)
    dense = torch.zeros(n, n, dtype=dtype, device=device)
    index = torch.tensor(graph.dst, device=device), torch.tensor(graph.src, device=device)
    weights = torch.from_numpy(graph.scaled_weights()).to(device, dtype)
    return dense.index_put_(index, weights, accumulate=True)
