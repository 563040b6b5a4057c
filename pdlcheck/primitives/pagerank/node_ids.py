"""Integer node ids that serve as names, held in one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeIds"]


class NodeIds(Sequence[int]):
    """The ids of the nodes in a file: node ``i`` of the graph has the id ``ids[i]``. Ids ascend.

    A tuple of Python integers would take five times the memory.

    Example:
        >>> ids = NodeIds(np.array([0, 4, 9]))
        >>> ids[1], ids.place(9), ids.place(5), list(ids)
        (4, 2, None, [0, 4, 9])
    """

    def __init__(self, ids: NDArray[Any]) -> None:
        self.array = np.asarray(ids, np.int64)
        if not (np.diff(self.array) > 0).all():
            raise ValueError("ids must ascend, each id once; sort them")
        self.array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> NodeIds: ...

    def __getitem__(self, place: int | slice) -> int | NodeIds:
        return NodeIds(self.array[place]) if isinstance(place, slice) else int(self.array[place])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __contains__(self, node: object) -> bool:
        return self.place(node) is not None

    def place(self, node: object) -> int | None:
        """Return the node whose id equals ``node``, or ``None``."""
        if isinstance(node, float | np.floating) and float(node).is_integer():
            node = int(node)
        if isinstance(node, bool) or not isinstance(node, int | np.integer) or not -(2**63) <= node < 2**63:
            return None
        place = int(np.searchsorted(self.array, node))
        return place if place < len(self.array) and self.array[place] == node else None

    def __repr__(self) -> str:
        return f"NodeIds({self.array!r})"
