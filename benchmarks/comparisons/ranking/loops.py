"""Power iterations that a user can write in a few lines: with SciPy, and with torch's sparse CSR."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from pdlcheck.checks.graphs import Edges
from ranking.peer import Peer, Question, Setting

__all__ = ["LOOPS"]

MAX_ITER = 300  # leaves 1e-21


def _in_edges(edges: Edges) -> tuple[Any, np.ndarray]:
    """Return the matrix of the shares that nodes send (row = destination), and the mask of dangling nodes."""
    n = edges.num_nodes
    weights = np.ones(len(edges.src)) if edges.weights is None else edges.weights
    out = np.bincount(edges.src, weights, n)
    shares = weights / np.where(out > 0, out, 1)[edges.src]
    return sp.csr_array((shares, (edges.dst, edges.src)), shape=(n, n)), out == 0


def _scipy(built: Any, question: Question, setting: Setting) -> np.ndarray:
    matrix, dangling = built
    n, d = matrix.shape[0], question.damping
    lost, x = np.flatnonzero(dangling), np.full(n, 1 / max(n, 1))
    for _ in range(MAX_ITER):
        new = d * (matrix @ x)
        new += (1 - d + d * x[lost].sum()) / n
        step, x = np.abs(new - x).sum(), new
        if step <= (setting or 1e-8):
            break
    return x


def _torch_matrix(edges: Edges, dtype: torch.dtype) -> Any:
    matrix, dangling = _in_edges(edges)
    ids = (torch.from_numpy(part.astype(np.int32)) for part in (matrix.indptr, matrix.indices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse CSR is in beta
        values = torch.from_numpy(matrix.data).to(dtype)
        return torch.sparse_csr_tensor(*ids, values, matrix.shape), torch.from_numpy(np.flatnonzero(dangling))


def _torch(built: Any, question: Question, setting: Setting) -> torch.Tensor:
    matrix, lost = built
    n, d = matrix.shape[0], question.damping
    x = torch.full((n,), 1 / max(n, 1), dtype=matrix.dtype)
    for _ in range(MAX_ITER):
        new = matrix @ x
        new.mul_(d).add_((1 - d + d * x[lost].sum()) / n)
        step, x = float((new - x).abs_().sum()), new
        if step <= (setting or 1e-8):
            break
    return x


def _double(edges: Edges, answer: torch.Tensor) -> np.ndarray:
    return answer.double().numpy()


LOOPS = [
    Peer("SciPy loop", "scipy", _in_edges, _scipy),
    Peer("torch CSR int32 f32", "torch", partial(_torch_matrix, dtype=torch.float32), _torch, _double),
    Peer("torch CSR int32 f64", "torch", partial(_torch_matrix, dtype=torch.float64), _torch, _double),
]
