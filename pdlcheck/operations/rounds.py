"""The bytes of tensors, and the rounds of messages that several algorithms have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdlcheck.compat.torch.tensors import sparse_parts
from pdlcheck.operations.operation import Operation

__all__ = ["Payload", "Round", "binomial_tree", "nbytes_of", "nbytes_of_inputs", "one_by_one", "ring"]

Payload = tuple[int, ...]  # bytes; each operation says of what
Round = list[tuple[int, int, int]]  # simultaneous messages (source, destination, bytes); numbers in the group


def nbytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; for a sparse tensor, those of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        return sum(map(nbytes_of, sparse_parts(tensor)))
    return tensor.numel() * tensor.element_size()


def nbytes_of_inputs(operation: Operation) -> int:
    """Return the bytes of the first input of every part."""
    return sum([nbytes_of(part.inputs[0]) for part in operation.parts])


def ring(n: int, pieces: Sequence[int], first: int) -> Iterator[Round]:
    """Yield rounds in which every rank passes a piece to the right.

    In the first round a rank passes the piece of the rank ``first`` places to its left.

    Example:
        >>> list(ring(2, (4, 8), 1))
        [[(0, 1, 8), (1, 0, 4)]]
    """
    for step in range(first, first + n - 1):
        yield [(place, (place + 1) % n, pieces[(place - step) % n]) for place in range(n)]


def binomial_tree(n: int, root: int, nbytes: int) -> Iterator[Round]:
    """Yield rounds in which every rank that holds the tensor passes it on.

    Example:
        >>> list(binomial_tree(3, 0, 4))
        [[(0, 1, 4)], [(0, 2, 4)]]
    """
    have = 1  # ranks that hold the tensor
    while have < n:
        yield [((root + k) % n, (root + k + have) % n, nbytes) for k in range(min(have, n - have))]
        have *= 2


def one_by_one(n: int, root: int) -> Iterator[int]:
    """Yield the other ranks, in the order in which the root exchanges a message with each."""
    return (place for place in range(n) if place != root)
