"""Hypothesis strategies of the suites: tensors, shards and groups of ranks. All shrink to the plain case.

Ranks get different values, shards are uneven and some are empty, because most faults show only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from pdlcheck.checks.rank_results import possible_order

__all__ = [
    "EXACT_DTYPES",
    "float_rank_tensors",
    "group_ranks",
    "module_makers",
    "rank_tensors",
    "sample_shards",
    "shard_sizes",
    "uneven_rank_tensors",
]

# Integers up to 2048 are exact in float16, and the sums of rank_tensors stay below that limit. Every backend can reduce
# these dtypes. int16 is missing because torch's own collectives reject it on gloo.
EXACT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32)

UP_TO_FIVE = st.integers(1, 5)
TWO_TO_FOUR = st.integers(2, 4)

Drawn = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def rank_tensors(
    draw: Drawn,
    *,
    world_sizes: st.SearchStrategy[int] = UP_TO_FIVE,
    dtypes: Sequence[torch.dtype] = EXACT_DTYPES,
    min_dims: int = 0,
    max_dims: int = 3,
    max_side: int = 5,
) -> list[Tensor]:
    """Draw one tensor for each rank, all with one shape and dtype.

    The elements are small integers, so any order of addition is exact. The last digit of a value identifies its rank:
    rank r holds ``10 * i + r + 1``, in the plainest case ``r + 1``. Shapes include 0-dimensional ones, empty ones, and
    ones with fewer elements than ranks.
    """
    world_size = draw(world_sizes)
    shape = draw(npst.array_shapes(min_dims=min_dims, max_dims=max_dims, min_side=0, max_side=max_side))
    return _told_apart(draw, [shape] * world_size, draw(st.sampled_from(dtypes)))


@st.composite
def uneven_rank_tensors(
    draw: Drawn,
    *,
    dim: int = 0,
    world_sizes: st.SearchStrategy[int] = UP_TO_FIVE,
    dtypes: Sequence[torch.dtype] = EXACT_DTYPES,
    max_dims: int = 3,
    max_side: int = 5,
) -> list[Tensor]:
    """Draw tensors as :func:`rank_tensors` does, with different sizes along ``dim``. Some ranks have size 0."""
    shape = draw(npst.array_shapes(min_dims=dim + 1, max_dims=max(max_dims, dim + 1), min_side=0, max_side=max_side))
    sizes = draw(world_sizes.flatmap(lambda n: st.lists(st.integers(0, max_side), min_size=n, max_size=n)))
    return _told_apart(draw, [(*shape[:dim], n, *shape[dim + 1 :]) for n in sizes], draw(st.sampled_from(dtypes)))


def _told_apart(draw: Drawn, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Draw values whose last digit identifies the rank."""
    tens = [draw(npst.arrays(np.int64, shape, elements=st.integers(-20, 20))) for shape in shapes]
    return [torch.from_numpy(np.asarray(ten * 10 + rank + 1)).to(dtype) for rank, ten in enumerate(tens)]


@st.composite
def float_rank_tensors(draw: Drawn, *, max_numel: int = 40) -> list[Tensor]:
    """Draw one vector of floats for each of 2 to 5 ranks, with any magnitude that cannot overflow in a sum."""
    world_size = draw(st.integers(2, 5))
    dtype, width = draw(st.sampled_from([(np.float32, 32), (np.float64, 64)]))
    elements = st.floats(-(2.0**100), 2.0**100, width=width, allow_subnormal=False)
    values = draw(npst.arrays(dtype, (world_size, draw(st.integers(1, max_numel))), elements=elements))
    return [torch.from_numpy(row.copy()) for row in values]


@st.composite
def group_ranks(draw: Drawn, *, world_size: int) -> list[int]:
    """Draw the global ranks of a group.

    The group may start at any rank, leave some ranks out, and have any order that torch keeps.
    """
    outside = draw(st.integers(0, 2))
    order: list[int] = draw(st.permutations(range(world_size + outside)))
    return possible_order(order[:world_size])


def shard_sizes(
    *, world_sizes: st.SearchStrategy[int] = TWO_TO_FOUR, max_samples: int = 6
) -> st.SearchStrategy[list[int]]:
    """Return a strategy for the number of samples of each rank.

    The numbers are uneven, and some but not all are 0. Examples shrink to one sample on rank 0.
    """
    return world_sizes.flatmap(
        lambda n: st.lists(st.integers(0, max_samples), min_size=n, max_size=n).filter(lambda sizes: sum(sizes) > 0)
    )


@st.composite
def sample_shards(
    draw: Drawn, *, sizes: st.SearchStrategy[list[int]] | None = None, features: int = 2
) -> list[tuple[Tensor, Tensor]]:
    """Draw inputs ``(n, features)`` and targets ``(n, 1)`` in float64 for each rank. Values are small multiples of 1/8.

    The first feature of a sample is never 0, so a model may branch on its sign.
    """
    chosen = draw(shard_sizes() if sizes is None else sizes)
    total = sum(chosen)
    values = draw(npst.arrays(np.float64, (total, features + 1), elements=st.integers(-16, 16)))
    data = torch.from_numpy(values) / 8
    data[:, 0] += torch.where(data[:, 0] >= 0, 1 / 16, -1 / 16)
    data[:, -1] += torch.arange(total) / 4  # samples differ, so a check can detect a sample that counts twice
    return [(part[:, :features].clone(), part[:, features:].clone()) for part in torch.split(data, chosen)]


@dataclass(frozen=True)
class MakeLayers:
    """A callable that makes a model of layers with the given widths.

    Optional are batch norm, which has floating and integer buffers, and tied weights.
    """

    widths: tuple[int, ...]
    batch_norm: bool
    tied: bool

    def __call__(self) -> torch.nn.Module:
        layers: list[torch.nn.Module] = []
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            layers += [torch.nn.Linear(before, after), torch.nn.Tanh()]
        if self.batch_norm:
            layers.append(torch.nn.BatchNorm1d(self.widths[-1]))
        if self.tied:
            again = torch.nn.Linear(self.widths[0], self.widths[1])
            again.weight = next(layers[0].parameters())
            layers += [torch.nn.Linear(self.widths[-1], self.widths[0]), again]
        return torch.nn.Sequential(*layers)


@st.composite
def module_makers(draw: Drawn) -> Callable[[], torch.nn.Module]:
    """Draw a function without arguments that makes a small model. Every call draws new weights."""
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    return MakeLayers(tuple(widths), batch_norm=draw(st.booleans()), tied=draw(st.booleans()))
