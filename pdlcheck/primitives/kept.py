"""How many bytes tensors hold, what several of them see counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["KeptBytes", "nbytes_of"]

View = tuple[int, torch.Size, tuple[int, ...], int]  # offset, shape and strides in elements, bytes of an element


class KeptBytes:
    """The bytes that tensors see; they stay alive, so that no address comes twice.

    Of a view what it sees counts, not what it is a view of: a batch, not the data that it was cut from.

    Args:
        but: the memory of these does not count.

    Example:
        >>> kept, rows = KeptBytes(), torch.zeros(4, 2)
        >>> for tensor in (rows[:2], rows[1:3], rows[1:3].t()):
        ...     kept.add(tensor)
        >>> kept.nbytes
        24
    """

    def __init__(self, but: KeptBytes | None = None) -> None:
        self._views: dict[int, set[View]] = defaultdict(set)
        self._alive: list[Tensor] = []
        self._but = but

    def add(self, tensor: Tensor) -> None:
        for part in _strided(tensor.detach()):
            place = part.untyped_storage().data_ptr()
            if self._but is None or place not in self._but._views:
                self._alive.append(part)
                self._views[place].add((int(part.storage_offset()), part.shape, part.stride(), part.element_size()))

    @property
    def nbytes(self) -> int:
        return sum(map(_seen, self._views.values()))


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of its elements; of a sparse tensor those of its indices and values."""
    return sum(part.numel() * part.element_size() for part in _strided(tensor.detach()))


def _seen(views: set[View]) -> int:
    """The bytes that some view sees, found by marking them."""
    views = {view for view in views if view[1].numel()}
    if not views:
        return 0
    first = min(offset * nbytes for offset, _, _, nbytes in views)
    end = max(
        (offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))) * nbytes
        for offset, shape, strides, nbytes in views
    )
    seen = torch.zeros(end - first, dtype=torch.bool)
    for offset, shape, strides, nbytes in views:
        steps = [step * nbytes for step in strides]
        seen.as_strided((*shape, nbytes), (*steps, 1), offset * nbytes - first).fill_(True)
    return int(seen.sum())


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that ``tensor`` consists of."""
    if tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
