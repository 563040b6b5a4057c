"""Ring, star and tree collectives: exact sums and copies on every rank of any group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlcheck.checks import (
    check_all_gather,
    check_all_reduce,
    check_all_reduce_agrees,
    check_broadcast,
    check_reduce_scatter,
    check_ring_pass,
)
from pdlcheck.checks.strategies import float_rank_tensors, group_ranks, rank_tensors

ON_TENSORS = [
    pytest.param(name, marks=pytest.mark.verifies(name), id=name)
    for name in (
        "ring_all_gather",
        "ring_all_reduce",
        "ring_pass",
        "ring_reduce_scatter",
        "star_broadcast",
        "tree_broadcast",
    )
]
SUMS = [
    pytest.param(name, marks=pytest.mark.verifies(name), id=name)
    for name in ("ring_all_reduce", "ring_pass", "ring_reduce_scatter")
]
BROADCASTS = [
    pytest.param(name, marks=pytest.mark.verifies(name), id=name) for name in ("star_broadcast", "tree_broadcast")
]
# A group costs tens of milliseconds on processes; each of its sizes and orders is another case.
few = settings(max_examples=10)


@pytest.mark.verifies("ring_all_reduce")
@given(inputs=rank_tensors())
def test_ring_all_reduce_is_the_sum_over_ranks(subject, world, inputs):
    check_all_reduce(subject, inputs, world)


@pytest.mark.verifies("ring_all_reduce")
@few
@given(data=st.data())
def test_ring_all_reduce_is_the_sum_over_the_ranks_of_any_group(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 3), max_side=3))
    check_all_reduce(subject, inputs, world, ranks=data.draw(group_ranks(world_size=len(inputs))))


@pytest.mark.verifies("ring_all_reduce")
@given(inputs=float_rank_tensors())
def test_ring_all_reduce_is_the_same_on_every_rank_to_the_last_bit(subject, world, inputs):
    check_all_reduce_agrees(subject, inputs, world)


@pytest.mark.verifies("ring_all_reduce")
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (2, 0, 3), (7,)], ids=str)
def test_ring_all_reduce_takes_fewer_elements_than_ranks(subject, world, shape):
    inputs = [torch.full(shape, rank + 1, dtype=torch.int64) for rank in range(4)]
    check_all_reduce(subject, inputs, world)


@pytest.mark.verifies("ring_all_reduce")
@pytest.mark.world_size(3)
def test_ring_all_reduce_overwrites_its_argument(subject, rank):
    tensor = torch.tensor([rank + 1.0])
    subject(tensor)
    assert tensor.item() == 6


@pytest.mark.beyond_contract("return values")
@pytest.mark.verifies("ring_all_reduce")
@pytest.mark.world_size(2)
def test_ring_all_reduce_returns_its_argument(subject, rank):
    tensor = torch.tensor([rank + 1.0])
    assert subject(tensor) is tensor


@pytest.mark.verifies("ring_all_reduce")
@pytest.mark.world_size(2)
def test_ring_all_reduce_of_a_parameter_stays_outside_of_autograd(subject, rank):
    weight = torch.nn.Parameter(torch.tensor([rank + 1.0]))
    subject(weight)
    assert weight.tolist() == [3]
    assert weight.is_leaf


@pytest.mark.verifies("ring_reduce_scatter")
@given(inputs=rank_tensors(min_dims=1))
def test_ring_reduce_scatter_gives_each_rank_its_part_of_the_sum(subject, world, inputs):
    check_reduce_scatter(subject, inputs, world)


@pytest.mark.verifies("ring_reduce_scatter")
@few
@given(data=st.data())
def test_ring_reduce_scatter_works_in_any_group(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 3), min_dims=1, max_side=3))
    check_reduce_scatter(subject, inputs, world, ranks=data.draw(group_ranks(world_size=len(inputs))))


@pytest.mark.verifies("ring_all_gather")
@given(inputs=rank_tensors())
def test_ring_all_gather_gives_every_rank_all_tensors_in_rank_order(subject, world, inputs):
    check_all_gather(subject, inputs, world)


@pytest.mark.verifies("ring_all_gather")
@few
@given(data=st.data())
def test_ring_all_gather_works_in_any_group(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 3), max_side=3))
    check_all_gather(subject, inputs, world, ranks=data.draw(group_ranks(world_size=len(inputs))))


@pytest.mark.verifies("star_broadcast")
@given(data=st.data())
def test_star_broadcast_copies_the_tensor_of_any_rank(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 7), max_side=3))
    check_broadcast(subject, inputs, world, src=data.draw(st.integers(0, len(inputs) - 1)))


@pytest.mark.verifies("star_broadcast")
@few
@given(data=st.data())
def test_star_broadcast_takes_the_global_rank_of_src_in_any_group(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 3), max_side=3))
    ranks = data.draw(group_ranks(world_size=len(inputs)))
    check_broadcast(subject, inputs, world, src=data.draw(st.integers(0, len(inputs) - 1)), ranks=ranks)


@pytest.mark.verifies("tree_broadcast")
@given(data=st.data())
def test_tree_broadcast_copies_the_tensor_of_any_rank(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 7), max_side=3))
    check_broadcast(subject, inputs, world, src=data.draw(st.integers(0, len(inputs) - 1)))


@pytest.mark.verifies("tree_broadcast")
@few
@given(data=st.data())
def test_tree_broadcast_takes_the_global_rank_of_src_in_any_group(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 3), max_side=3))
    ranks = data.draw(group_ranks(world_size=len(inputs)))
    check_broadcast(subject, inputs, world, src=data.draw(st.integers(0, len(inputs) - 1)), ranks=ranks)


@pytest.mark.verifies("ring_pass")
@given(inputs=rank_tensors())
def test_ring_pass_adds_1_on_every_rank_and_comes_home(subject, world, inputs):
    check_ring_pass(subject, inputs, world)


@pytest.mark.verifies("ring_pass")
@few
@given(data=st.data())
def test_ring_pass_works_in_any_group(subject, world, data):
    inputs = data.draw(rank_tensors(world_sizes=st.integers(1, 3), max_side=3))
    check_ring_pass(subject, inputs, world, ranks=data.draw(group_ranks(world_size=len(inputs))))


CHECKS = {
    "ring_all_gather": check_all_gather,
    "ring_all_reduce": check_all_reduce,
    "ring_pass": check_ring_pass,
    "ring_reduce_scatter": check_reduce_scatter,
    "star_broadcast": check_broadcast,
    "tree_broadcast": check_broadcast,
}


@pytest.mark.beyond_contract("dtypes that torch's collectives refuse on gloo")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.parametrize("number", [2, 3])
def test_int16_travels_too(name, subject, world, number):
    inputs = [torch.tensor([10, 20, 300], dtype=torch.int16) + rank for rank in range(number)]
    CHECKS[name](subject, inputs, world)


@pytest.mark.beyond_contract("return values")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.world_size(2)
def test_a_parameter_stays_outside_of_autograd(name, subject):
    parameter = torch.nn.Parameter(torch.ones(2))
    result = subject(parameter)
    assert parameter.is_leaf
    assert result is parameter or not result.requires_grad


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.world_size(2)
def test_a_strided_tensor_is_refused_with_the_cure(name, subject):
    with pytest.raises(
        ValueError,
        match=rf"{name} needs a contiguous tensor, got strides \(1, 3\) for shape \(3, 2\); call .contiguous",
    ):
        subject(torch.ones(2, 3).t())


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.world_size(2)
def test_a_sparse_tensor_is_refused_with_the_cure(name, subject):
    with pytest.raises(ValueError, match=rf"{name} needs a dense tensor, got layout torch.sparse_coo; call .to_dense"):
        subject(torch.eye(2).to_sparse())


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.world_size(2)
def test_a_tensor_on_another_device_is_refused_with_the_cure(name, subject):
    with pytest.raises(ValueError, match=rf"{name} got tensor on device meta, .*move it with .to\('"):
        subject(torch.empty(2, device="meta"))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.world_size(2)
def test_something_else_than_a_tensor_is_refused(name, subject):
    with pytest.raises(TypeError, match=rf"{name} takes a torch.Tensor, got list; torch.as_tensor makes one"):
        subject([1.0])


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", ON_TENSORS)
@pytest.mark.world_size(3)
def test_a_rank_outside_the_group_is_told_so(name, subject, rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match=rf"{name} was called on rank 1, which is outside the group"):
            subject(torch.ones(2), group=group)
    else:
        subject(torch.ones(2), group=group)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", ON_TENSORS)
def test_without_a_process_group_the_error_says_what_to_call(name, subject):
    with pytest.raises(ValueError, match=rf"{name} needs a process group; call torch.distributed.init_process_group"):
        subject(torch.ones(2))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", BROADCASTS)
@pytest.mark.world_size(3)
def test_a_src_outside_the_group_is_refused(name, subject, rank):
    group = dist.new_group([1, 2])
    if rank:
        with pytest.raises(ValueError, match=rf"{name} got src=0, which is outside the group; .* one of \[1, 2\]"):
            subject(torch.ones(2), src=0, group=group)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.world_size(2)
def test_booleans_are_not_added(name, subject):
    with pytest.raises(TypeError, match=rf"{name} adds numbers, got dtype torch.bool; call .to\(torch.int32\)"):
        subject(torch.ones(2, dtype=torch.bool))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ring_reduce_scatter")
@pytest.mark.world_size(2)
def test_a_tensor_without_dimensions_is_not_scattered(subject):
    with pytest.raises(ValueError, match="ring_reduce_scatter needs a dimension to split"):
        subject(torch.tensor(1.0))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.verifies("ring_all_reduce")
@pytest.mark.world_size(3)
def test_bad_input_on_one_rank_is_an_error_before_any_message(subject, rank):
    tensor = torch.ones(2, 3)
    if rank == 1:
        with pytest.raises(ValueError, match="contiguous"):
            subject(tensor.t())
        tensor = tensor.t().contiguous().view(2, 3)
    subject(tensor)  # the first call left nothing behind
    assert tensor.tolist() == [[3.0] * 3] * 2
