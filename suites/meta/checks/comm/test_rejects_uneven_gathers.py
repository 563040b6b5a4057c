"""check_all_gather accepts tensors of different sizes, as a list or concatenated, and names the cause of errors."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.checks import check_all_gather
from pdlcheck.checks.rank_results import possible_order
from pdlcheck.checks.strategies import uneven_rank_tensors
from pdlcheck.worlds import get_world

from .collectives_by_hand import along_the_last_dimension, everyone, shifted_by_one

INPUTS = [torch.tensor([10.0, 20, 30, 40]) + rank + 1 for rank in range(3)]
UNEVEN = [torch.arange(2.0 * n).view(n, 2) + 10 * (rank + 1) for rank, n in enumerate((1, 3, 0))]
GROUP = possible_order([3, 1])


def sizes_of(tensor, group=None, dim=0):
    return [int(size) for size in everyone(torch.tensor(tensor.shape[dim]), group)]


def padded(tensor, group=None, dim=0):
    """Return the tensors of all ranks, each padded to the largest size along ``dim``."""
    longest = torch.zeros(*tensor.shape[:dim], max(sizes_of(tensor, group, dim)), *tensor.shape[dim + 1 :]).to(tensor)
    longest.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return everyone(longest, group)


def cut(tensor, group=None, dim=0):
    sizes = sizes_of(tensor, group, dim)
    return [part.narrow(dim, 0, size) for part, size in zip(padded(tensor, group, dim), sizes, strict=True)]


def cut_to_its_own_size(tensor, group=None):
    return [part[: len(tensor)] for part in padded(tensor, group)]


def cut_from_the_end(tensor, group=None):
    return [part[len(part) - size :] for part, size in zip(padded(tensor, group), sizes_of(tensor, group), strict=True)]


def in_the_order_of_sizes(tensor, group=None):
    return sorted(cut(tensor, group), key=len)


def without_empty_ones(tensor, group=None):
    return [part for part in cut(tensor, group) if len(part)]


def own_in_every_place_that_fits(tensor, group=None):
    return [tensor if part.shape == tensor.shape else torch.zeros_like(part) for part in cut(tensor, group)]


@pytest.mark.parametrize("ranks", [None, GROUP], ids=["default", "group"])
def test_check_all_gather_accepts_sizes_that_differ(world, ranks):
    inputs = UNEVEN[: len(ranks or UNEVEN)]
    check_all_gather(cut, inputs, world, ranks=ranks)
    check_all_gather(lambda tensor, group=None: torch.cat(cut(tensor, group)), inputs, world, ranks=ranks, dim=0)


@given(data=st.data())
def test_check_all_gather_accepts_sizes_that_differ_along_any_dimension(data):
    dim = data.draw(st.integers(0, 2))
    inputs = data.draw(uneven_rank_tensors(dim=dim))
    check_all_gather(partial(cut, dim=dim), inputs, get_world("sim"))
    check_all_gather(lambda tensor: torch.cat(cut(tensor, dim=dim), dim), inputs, get_world("sim"), dim=dim)


REJECTED = [
    (
        padded,
        r"rank 0 holds shape \(3, 2\) and torch.float32 of the tensor of rank 0, expected shape \(1, 2\) .*\n"
        r"  likely cause  it is as long as the longest: padding was not cut off\n"
        r"  case          world=\w+ world_size=3 shapes=\[\(1, 2\), \(3, 2\), \(0, 2\)\]",
    ),
    (
        cut_to_its_own_size,
        r"rank 0 holds shape \(1, 2\) and torch.float32 of the tensor of rank 1[\s\S]*as large as this rank's own",
    ),
    (cut_from_the_end, r"rank 0 holds 0 at \(0, 0\) of the tensor of rank 0, rank 0 gave 10\n[\s\S]*nothing arrived"),
    (in_the_order_of_sizes, r"rank 0 holds shape \(0, 2\) and torch.float32 of the tensor of rank 0"),
    (without_empty_ones, r"rank 0 returned 2 tensors, expected one for each of 3 ranks"),
    (
        own_in_every_place_that_fits,
        r"rank 0 holds 0 at \(0, 0\) of the tensor of rank 1, rank 1 gave 20\n[\s\S]*it is zero: nothing arrived",
    ),
]


@pytest.mark.parametrize(("broken", "message"), REJECTED, ids=lambda value: getattr(value, "__name__", ""))
def test_check_all_gather_rejects_sizes_that_differ(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: {message}"):
        check_all_gather(broken, UNEVEN, world)


def concatenated(tensor, group=None, *, part, order=1):
    return torch.cat(part(tensor, group)[::order])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"part": padded}, r"rank 0 holds shape \(9, 2\) .* expected shape \(4, 2\)[\s\S]*padding was not cut off"),
        ({"part": cut, "order": -1}, r"rank 0 holds 20 at \(0, 0\), concatenated along dimension 0 the inputs hold 10"),
    ],
)
def test_check_all_gather_rejects_what_is_not_concatenated(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^concatenated: {message}"):
        check_all_gather(partial(concatenated, **broken), UNEVEN, world, dim=0)


def test_check_all_gather_says_which_order_the_ranks_are_in(world):
    def shifted(tensor):
        return torch.cat(shifted_by_one(tensor), -1)

    check_all_gather(along_the_last_dimension, INPUTS, world, dim=-1)
    with pytest.raises(AssertionError, match=r"the ranks are in the order \[2, 0, 1\]"):
        check_all_gather(shifted, INPUTS, world, dim=-1)
    with pytest.raises(AssertionError, match=r"expected shape \(12,\)[\s\S]*it is stacked along a new first dimension"):
        check_all_gather(lambda tensor: torch.stack(everyone(tensor)), INPUTS, world, dim=0)


def test_check_all_gather_says_how_inputs_of_different_sizes_are_returned(world):
    with pytest.raises(AssertionError, match=r"rank 0 returned one tensor, of shape \(4, 2\); inputs of .* pass dim="):
        check_all_gather(lambda tensor: torch.cat(cut(tensor)), UNEVEN, world)
    with pytest.raises(ValueError, match="cannot concatenate its inputs"):
        check_all_gather(lambda tensor: tensor, [torch.ones(2, 2), torch.ones(3, 3)], world, dim=0)
