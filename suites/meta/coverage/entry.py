"""One feature of the matrix, and the inputs that its programs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["WORLD_SIZE", "Feature", "everywhere", "given", "mine", "of_all"]

WORLD_SIZE = 4


@dataclass(frozen=True)
class Feature:
    """A program for ranks, and the function by which a single process without a group computes the same.

    Args:
        name: the field's term.
        program: runs on every rank; returns tensors, plain values, or lists, tuples and dicts of these.
        alone: the values that the ranks must return, one for each.
        world_size: number of ranks that the program takes.
        numerics: whether there are values to compute. If not, the matrix shows ``runs`` instead of ``=``.
        rtol: largest error, relative to the largest element of a tensor; None: a few roundings of its dtype.
        errors: column -> the error that is right there, or that simulated ranks raise because they lack the feature.
        alone_under: column -> the function for a single process under the rules of that column.
        why: reason for ``errors`` or ``alone_under``; the sentence below the table.
    """

    name: str
    program: Callable[[], Any]
    alone: Callable[[], Sequence[Any]]
    world_size: int = WORLD_SIZE
    numerics: bool = True
    rtol: float | None = None
    errors: Mapping[str, type[BaseException]] = field(default_factory=dict)
    alone_under: Mapping[str, Callable[[], Sequence[Any]]] = field(default_factory=dict)
    why: str = ""


def given(rank: int, *shape: int) -> Tensor:
    """Return the input of one rank: float32 numbers whose sum depends on the order of adding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1))


def mine(*shape: int) -> Tensor:
    return given(dist.get_rank(), *shape)


def of_all(*shape: int) -> list[Tensor]:
    return [given(rank, *shape) for rank in range(WORLD_SIZE)]


def everywhere(value: Any) -> list[Any]:
    """Return the same value for every rank."""
    return [value] * WORLD_SIZE
