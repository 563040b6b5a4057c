"""Counts of the bytes that tensors hold; memory shared by several tensors counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from pdlcheck.compat.torch.tensors import sparse_parts

__all__ = ["KeptBytes", "nbytes_of"]

View = tuple[int, torch.Size, tuple[int, ...], int]  # offset, shape and strides in elements, bytes of an element


class KeptBytes:
    """The bytes in the elements of tensors. It keeps the tensors alive, so that no address is reused.

    A view counts with its own elements, not with the whole tensor behind it: a batch, not the data it was cut from.

    Args:
        but: tensors whose memory does not count.

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
        """Count the elements of ``tensor``, unless its memory belongs to the tensors of ``but``."""
        for part in _strided(tensor.detach()):
            place = part.untyped_storage().data_ptr()
            if self._but is None or not self._but.covers(place):
                self._alive.append(part)
                self._views[place].add((int(part.storage_offset()), part.shape, part.stride(), part.element_size()))

    def covers(self, address: int) -> bool:
        """Return whether the memory of a counted tensor begins at this address."""
        return address in self._views

    @property
    def nbytes(self) -> int:
        """Return the number of bytes, each counted once."""
        return sum(map(_seen, self._views.values()))


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of the tensor's elements. A sparse tensor counts its indices and values."""
    return sum(part.numel() * part.element_size() for part in _strided(tensor.detach()))


def _seen(views: set[View]) -> int:
    """Return the number of bytes that at least one view covers, found by marking them."""
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
    """Yield the dense tensors that ``tensor`` consists of."""
    if tensor.layout == torch.sparse_coo:
        yield from sparse_parts(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
