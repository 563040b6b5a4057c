"""Sums over the in-edges of this rank's nodes: a loop over int32 ids on the CPU, torch's CSR on other devices."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdlcheck.primitives.pagerank.compiled import compiled
from pdlcheck.primitives.pagerank.graph import Float64, Ids, Int64

__all__ = ["Rows", "csr"]


class Rows:
    """A sparse matrix whose row j holds the in-edges of node j, which may repeat.

    It takes 4 bytes per edge on the CPU, 12 with weights or on another device, and 8 per row.

    Args:
        row, column: the row and the column of each edge; a column is a place in the vector that multiplies the matrix.
        weights: the weight of each edge; ``None``, or all 1, stores none.
        num_rows, num_columns: the shape of the matrix.
        device: the device of the vectors.

    Example:
        >>> sums = torch.zeros(2, dtype=torch.float64)
        >>> rows = Rows(np.array([1, 1]), np.array([0, 0]), None, 2, 1, torch.device("cpu"))
        >>> rows.add(torch.tensor([0.25], dtype=torch.float64), sums)
        >>> sums.tolist()
        [0.0, 0.5]
    """

    def __init__(
        self,
        row: Ids,
        column: Ids,
        weights: Float64 | None,
        num_rows: int,
        num_columns: int,
        device: torch.device,
    ) -> None:
        if weights is not None and (weights == 1).all():
            weights = None
        self.degree: Int64 = np.bincount(row, minlength=num_rows).astype(np.int64, copy=False)
        ids = np.int32 if num_columns < np.iinfo(np.int32).max else np.int64
        self._begins = np.concatenate([[0], np.cumsum(self.degree)])
        self._sources: NDArray[Any] = np.empty(len(row), ids)
        self._weights = None if weights is None else np.empty(len(row))
        _fill(row, column, weights, self._begins[:-1].copy(), self._sources, self._weights)
        self._matrix: Tensor | None = None
        if device.type != "cpu":
            self._matrix = csr(self._begins, self._sources, self._weights, num_columns).to(device)
            del self._begins, self._sources, self._weights

    def add(self, values: Tensor, sums: Tensor) -> None:
        """Add ``sum(weight * values[column])`` over row j to ``sums[j]``, in float64.

        On the CPU one thread adds, in the order of the edges.
        """
        if self._matrix is None:
            _add(self._begins, self._sources, self._weights, values.numpy(), sums.numpy())
        elif self._matrix.values().numel():
            sums += self._matrix @ values


def csr(begins: Int64, sources: NDArray[Any], weights: Float64 | None, num_columns: int) -> Tensor:
    """Return the matrix as a CSR tensor of torch, float64 with int64 ids; a column may repeat in a row."""
    values = np.ones(len(sources)) if weights is None else weights
    with warnings.catch_warnings():
        # torch warns once that CSR is in beta and that it trusts the ids, which have just been made
        warnings.filterwarnings("ignore", "Sparse (CSR tensor support|invariant checks)", UserWarning)
        parts = torch.from_numpy(begins), torch.from_numpy(sources.astype(np.int64)), torch.from_numpy(values)
        return torch.sparse_csr_tensor(*parts, (len(begins) - 1, num_columns))


@compiled()
def _fill(row: Any, column: Any, weights: Any, next_place: Any, sources: Any, kept: Any) -> None:
    for e in range(row.size):
        at = next_place[row[e]]
        next_place[row[e]] = at + 1
        sources[at] = column[e]
        if weights is not None:
            kept[at] = weights[e]


@compiled()
def _add(begins: Any, sources: Any, weights: Any, values: Any, sums: Any) -> None:
    for j in range(sums.size):
        total = 0.0
        for e in range(begins[j], begins[j + 1]):
            if weights is None:
                total += values[sources[e]]
            else:
                total += weights[e] * values[sources[e]]
        sums[j] += total
