"""The all_gather of tensors that differ between ranks: every rank gets all of them, whatever their shapes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks import check_all_gather
from pdlcheck.checks.strategies import group_ranks, uneven_rank_tensors

pytestmark = pytest.mark.verifies("all_gather_uneven")


@given(inputs=uneven_rank_tensors())
def test_every_rank_gets_all_tensors_in_rank_order(subject, world, inputs):
    check_all_gather(subject, inputs, world)


@settings(max_examples=10)
@given(data=st.data())
def test_it_works_in_any_group(subject, world, data):
    inputs = data.draw(uneven_rank_tensors(world_sizes=st.integers(1, 3), max_side=3))
    check_all_gather(subject, inputs, world, ranks=data.draw(group_ranks(world_size=len(inputs))))


OF_RANKS = [
    torch.tensor([[True, False, True]]),
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor([1 + 2j, -1j]).conj(),
    torch.empty(0, 4, dtype=torch.bfloat16),
]


def test_numbers_of_dimensions_and_dtypes_may_differ(subject, world):
    def gathered():
        return subject(OF_RANKS[dist.get_rank()])

    for found in world.run(gathered, world_size=4):
        for one, expected in zip(found, OF_RANKS, strict=True):
            assert one.dtype == expected.dtype
            assert one.shape == expected.shape
            assert torch.equal(one, expected)


def test_the_result_is_new_and_the_argument_is_kept(subject, world):
    def run():
        mine = torch.full((2,), float(dist.get_rank()), requires_grad=True)
        found = subject(mine)
        for one in found:
            one += 1
        return mine.tolist(), [one.requires_grad for one in found]

    assert world.run(run, world_size=2) == [([0.0, 0.0], [False, False]), ([1.0, 1.0], [False, False])]


def test_no_rank_waits_if_the_argument_of_one_is_wrong(subject, world):
    def raised():
        try:
            subject([1, 2] if dist.get_rank() == 1 else torch.ones(2))
        except TypeError as error:
            return str(error)

    text = "all_gather_uneven takes a torch.Tensor, got list; torch.as_tensor makes one (on rank 1)"
    assert world.run(raised, world_size=3) == [text] * 3
