"""Edges as columns, gathered piece by piece into arrays that grow in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.memory import graph_nbytes, require_free_memory, solver_nbytes

__all__ = ["Columns", "GrowingColumns", "Progress", "wide_enough"]

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and those of the whole file."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Ids of int32, or int64 where one does not fit, and float64 weights or None; num_nodes is the largest id + 1."""

    src: NDArray[Any]
    dst: NDArray[Any]
    num_nodes: int
    weights: NDArray[np.float64] | None


def wide_enough(ids: NDArray[Any], largest: int) -> NDArray[Any]:
    """``ids`` themselves, or as int64 where ``largest`` does not fit into theirs."""
    return ids if largest <= np.iinfo(ids.dtype).max else ids.astype(np.int64)


class GrowingColumns:
    """Columns that are resized in place: the system moves the pages of a large array, it does not copy them.

    Before they grow, what ranking the whole file will take is compared with the memory that is free.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = [np.empty(0, np.int32), np.empty(0, np.int32)]
        self._weights: NDArray[np.float64] | None = None
        self._edges, self._largest, self._nodes_that_fit = 0, -1, 0

    def add(
        self,
        src: NDArray[Any],
        dst: NDArray[Any],
        weights: NDArray[np.float64] | None,
        largest: tuple[int, str],
        share: float,
    ) -> None:
        """Append edges; all pieces have weights, or none has.

        Args:
            largest: the largest id among them, -1 without edges, and where it stands in the file.
            share: how much of the file has been read with them; the number of edges is guessed from it.

        Raises:
            MemoryError: the edges or the nodes of the whole file do not fit; an id that asks for too many is named.
        """
        self._require_room_for_nodes(*largest)
        self._ids = [wide_enough(ids, largest[0]) for ids in self._ids]
        self._largest = max(self._largest, largest[0])
        if self._weights is None and weights is not None:
            self._weights = np.empty(len(self._ids[0]))
        edges = self._edges + len(src)
        if edges > len(self._ids[0]):
            self._grow(max(edges, int(1.01 * edges / share)))
        for column, new in zip(self._ids, (src, dst), strict=True):
            column[self._edges : edges] = new
        if self._weights is not None:
            self._weights[self._edges : edges] = weights
        self._edges = edges

    def columns(self) -> Columns:
        """What was gathered; nothing can be added after it."""
        self._resize(self._edges)
        return Columns(self._ids[0], self._ids[1], self._largest + 1, self._weights)

    def _grow(self, edges: int) -> None:
        weighted = self._weights is not None
        more = edges - len(self._ids[0])
        nbytes = graph_nbytes(more, weighted=weighted, id_nbytes=self._ids[0].itemsize)
        nbytes += graph_nbytes(edges, weighted=weighted)  # a Graph copies its columns
        nbytes += solver_nbytes(self._largest + 1, edges, weighted=weighted)
        what = f"{self._path}: ranking about {edges} edges between {self._largest + 1} nodes"
        require_free_memory(what, nbytes, "use a machine with more memory, or fewer edges")
        self._resize(edges)

    def _resize(self, edges: int) -> None:
        for array in (*self._ids, *(() if self._weights is None else (self._weights,))):
            array.resize(edges, refcheck=False)

    def _require_room_for_nodes(self, largest: int, where: str) -> None:
        if largest < self._nodes_that_fit:
            return
        what = f"{where}: node id {largest} asks for {largest + 1} nodes, which"
        require_free_memory(what, solver_nbytes(largest + 1, 0), "number the nodes from 0 without large gaps")
        self._nodes_that_fit = 2 * (largest + 1)
