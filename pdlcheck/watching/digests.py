"""Digests of tensors: one word of 64 bits for each, computed on the device of the tensor.

A word is the sum of all elements, as integers, each times an odd pseudo-random weight of its position, modulo 2**64. So
each bit, each sign and each payload of a NaN counts. A change of one element always changes the word. A change of
several leaves it as it was with a probability of at most about 2**-31.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Digester", "signed", "weight_of", "word_of"]

ROW = 2048  # words of 8 bytes; tensors without a whole row are copied into one
CHUNK_ROWS = {"cpu": 32}  # a chunk stays in the cache of a CPU
PATTERNS = 16  # combinations of sizes whose weights are kept
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

Pattern = tuple[Tensor, Tensor]  # the weight of each element, and the end of each tensor


def signed(word: int) -> int:
    """Return an integer modulo 2**64, in the range of int64.

    Example:
        >>> signed(2**64 - 1), signed(2**63), signed(5)
        (-1, -9223372036854775808, 5)
    """
    return (word + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=100_000)
def word_of(text: str) -> int:
    """Return a digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def weight_of(text: str) -> int:
    """Return an odd digest of a text."""
    return word_of(text) | 1


class Digester:
    """The digests of lists of tensors, and the weights that they need.

    Args:
        device: where the words go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: dict[tuple[int, torch.device], Tensor] = {}
        self._patterns: dict[tuple[torch.device, tuple[int, ...]], Pattern] = {}

    def words(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one int64 for each tensor, on the device of the digester. An empty tensor has 0."""
        places: list[int] = []
        found: list[Tensor] = []
        small: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
        for place, tensor in enumerate(tensors):
            flat = _flat(tensor)
            if flat.numel() * flat.itemsize >= 8 * ROW:
                word, flat = self._rows(flat)
                places.append(place)
                found.append(word.reshape(1).to(self.device))
            if flat.numel():
                small.setdefault((flat.dtype, flat.device), []).append((place, flat))
        for pieces in small.values():
            places += [place for place, _ in pieces]
            found.append(self._together([flat for _, flat in pieces]).to(self.device))
        words = torch.zeros(len(tensors), dtype=torch.int64, device=self.device)
        if found:
            words.index_add_(0, torch.tensor(places, device=self.device), torch.cat(found))
        return words

    def _together(self, flats: list[Tensor]) -> Tensor:
        """Return the words of small tensors of one dtype."""
        flat = torch.cat(flats)
        flat = flat.view(INTEGERS[flat.itemsize])
        factor = flats[0].itemsize // flat.itemsize
        weights, ends = self._pattern(flat.device, tuple(one.numel() * factor for one in flats))
        sums = (flat.to(torch.int64) * weights).cumsum(0)[ends]
        return torch.cat([sums[:1], sums[1:] - sums[:-1]])

    def _rows(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the word of all whole rows of a large tensor, and the elements after them.

        An even number of changes of the highest bit would cancel out in the sum of words of 8 bytes. So the upper half
        of each word counts once more.
        """
        length = 8 * ROW // flat.itemsize
        count = flat.numel() // length
        head = flat[: count * length]
        if head.storage_offset() * flat.itemsize % 8:
            head = head.clone()
        rows = head.view(torch.int64).view(count, ROW)
        whole, upper = (self._table(salt, ROW, flat.device) for salt in (1, 2))
        of_row = self._table(3, count, flat.device)
        chunk = CHUNK_ROWS.get(flat.device.type, 1024)
        sums = [
            _products(part, whole) + _products(part >> 32, upper)
            for part in (rows[i : i + chunk] for i in range(0, count, chunk))
        ]
        return (torch.cat(sums) * of_row).sum(), flat[count * length :]

    def _pattern(self, device: torch.device, sizes: tuple[int, ...]) -> Pattern:
        pattern = self._patterns.get((device, sizes))
        if pattern is None:
            if len(self._patterns) >= PATTERNS:
                self._patterns.clear()
            table = self._table(4, max(sizes), device)
            weights = torch.cat([table[:size] for size in sizes])
            pattern = weights, torch.tensor(sizes, device=device).cumsum(0) - 1
            self._patterns[device, sizes] = pattern
        return pattern

    def _table(self, salt: int, size: int, device: torch.device) -> Tensor:
        """Return ``size`` odd pseudo-random weights; the first ones are the same for every size."""
        table = self._tables.get((salt, device))
        if table is None or len(table) < size:
            table = _mixed(torch.arange(1, max(size, 256) + 1, device=device) + (salt << 40)) | 1
            self._tables[salt, device] = table
        return table[:size]


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().resolve_neg().reshape(-1)


def _products(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row. CUDA has no product of integer matrices."""
    return torch.mv(rows, weights) if rows.device.type == "cpu" else (rows * weights).sum(1)


def _mixed(numbers: Tensor) -> Tensor:
    """Return pseudo-random numbers, the same on every device: the steps of splitmix64, with signed shifts."""
    numbers = numbers * signed(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> 30)) * signed(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> 27)) * signed(0x94D049BB133111EB)
    return numbers ^ (numbers >> 31)
