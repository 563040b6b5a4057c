"""Edges as columns, gathered piece by piece into arrays that grow in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.memory import graph_nbytes, require_free_memory, solver_nbytes

__all__ = ["Columns", "GrowingColumns", "Progress", "wide_enough"]

Progress = Callable[[int, int | None], None]
"""Called with the bytes read so far and those of the whole file, ``None`` for a pipe."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The edges of a file: ids of int32, or int64 if one does not fit, and float64 weights or ``None``.

    ``largest`` is the largest id, -1 without edges. With ``names``, ids are places in it.
    """

    src: NDArray[Any]
    dst: NDArray[Any]
    largest: int
    weights: NDArray[np.float64] | None
    names: Sequence[Hashable] | None = None


def wide_enough(ids: NDArray[Any], largest: int) -> NDArray[Any]:
    """Return ``ids`` themselves, or as int64 if ``largest`` does not fit in their dtype."""
    return ids if largest <= np.iinfo(ids.dtype).max else ids.astype(np.int64)


class GrowingColumns:
    """Columns that are resized in place: the system moves the pages of a large array instead of copying them.

    Before they grow, the memory for ranking the whole file is compared with the memory that is free.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ids = [np.empty(0, np.int32), np.empty(0, np.int32)]
        self._weights: NDArray[np.float64] | None = None
        self._edges, self._largest = 0, -1

    def add(
        self,
        src: NDArray[Any],
        dst: NDArray[Any],
        weights: NDArray[np.float64] | None,
        largest: int,
        share: float | None,
    ) -> None:
        """Append edges; all pieces have weights, or none has.

        Args:
            src: sources of the edges.
            dst: destinations of the edges.
            weights: their weights, or ``None``.
            largest: the largest id among them, -1 without edges.
            share: the share of the file that has been read with them, to estimate the number of edges; ``None`` if
                unknown.

        Raises:
            MemoryError: the edges of the whole file do not fit.
        """
        self._ids = [wide_enough(ids, largest) for ids in self._ids]
        self._largest = max(self._largest, largest)
        if self._weights is None and weights is not None:
            self._weights = np.empty(len(self._ids[0]))
        edges = self._edges + len(src)
        if edges > len(self._ids[0]):
            self._grow(max(edges, int(1.5 * edges if share is None else 1.01 * edges / max(share, 1e-9))))
        for column, new in zip(self._ids, (src, dst), strict=True):
            column[self._edges : edges] = new
        if self._weights is not None:
            self._weights[self._edges : edges] = weights
        self._edges = edges

    def columns(self, names: Sequence[Hashable] | None = None) -> Columns:
        """Return the columns; no edge can be added afterwards."""
        self._resize(self._edges)
        return Columns(self._ids[0], self._ids[1], self._largest, self._weights, names)

    def _grow(self, edges: int) -> None:
        weighted = self._weights is not None
        nodes = self._largest + 1 if self._largest < edges else 0  # ids with gaps do not show the number of nodes
        more = edges - len(self._ids[0])
        nbytes = graph_nbytes(more, weighted=weighted, id_nbytes=self._ids[0].itemsize)
        nbytes += graph_nbytes(edges, weighted=weighted)  # a Graph copies its columns
        nbytes += solver_nbytes(nodes, edges, weighted=weighted)
        what = f"{self._name}: ranking about {edges} edges" + (f" between {nodes} nodes" if nodes else "")
        require_free_memory(what, nbytes, "use a machine with more memory, or fewer edges")
        self._resize(edges)

    def _resize(self, edges: int) -> None:
        for array in (*self._ids, *(() if self._weights is None else (self._weights,))):
            array.resize(edges, refcheck=False)
