"""What the matrix says of one feature, and the inputs that its programs have in common."""

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
    """A program for ranks, and what a single process without a process group computes in its place.

    Args:
        name: the field's term.
        program: runs on every rank; returns tensors, plain values, or lists, tuples and dicts of these.
        alone: the values that the ranks must return, one for each.
        world_size: how many ranks the program takes.
        numerics: are there values to compute? If not, the matrix says ``runs`` where it says ``=`` otherwise.
        rtol: largest error, relative to the largest element of a tensor; None: a few roundings of its dtype.
        errors: column -> the error that is right there, or that says what simulated ranks cannot do.
        alone_under: column -> what a single process computes under its rules.
        why: why there are ``errors``, or ``alone_under`` differs; the sentence below the table.
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
    """The input of one rank: float32 numbers whose sum depends on the order of adding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank + 1))


def mine(*shape: int) -> Tensor:
    return given(dist.get_rank(), *shape)


def of_all(*shape: int) -> list[Tensor]:
    return [given(rank, *shape) for rank in range(WORLD_SIZE)]


def everywhere(value: Any) -> list[Any]:
    """The same on every rank."""
    return [value] * WORLD_SIZE
