"""The checks of all_reduce and reduce_scatter accept reduce-ops other than SUM, and name the cause of wrong results."""

from __future__ import annotations

from functools import partial, reduce

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pdlcheck.checks import check_all_reduce, check_all_reduce_agrees, check_reduce_scatter
from pdlcheck.checks.rank_results import possible_order
from pdlcheck.checks.strategies import float_rank_tensors, rank_tensors
from pdlcheck.worlds import get_world

from .collectives_by_hand import (
    averaged,
    everyone,
    in_its_own_order,
    maximum,
    never_reduced,
    overwrite,
    ring,
    scattered,
    summed,
)

INPUTS = [torch.tensor([-1.0, 7, -13, 40]) * (rank + 1) for rank in range(3)]
GROUP = possible_order([3, 1])
AVG, MAX, MIN, PRODUCT = dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT
COMBINE = {MAX: torch.maximum, MIN: torch.minimum, PRODUCT: torch.mul}


def with_op(op, tensor, group=None):
    """Reduce in an order that begins with this rank's own tensor."""
    tensors, rank = everyone(tensor, group), dist.get_rank(group)
    return overwrite(tensor, reduce(COMBINE[op], tensors[rank:] + tensors[:rank]))


def divided_first(tensor, group=None):
    tensor /= dist.get_world_size(group)
    return overwrite(tensor, sum(everyone(tensor, group)))


def divided_twice(tensor, group=None):
    return averaged(tensor, group).div_(dist.get_world_size(group))


def divided_only(tensor, group=None):
    return tensor.div_(dist.get_world_size(group))


def averaged_without_rank_1(tensor, group=None):
    tensors = everyone(tensor, group)
    return overwrite(tensor, (sum(tensors) - tensors[1]) / dist.get_world_size(group))


def mean_of_those_that_came(tensor, group=None):
    return overwrite(tensor, sum(everyone(tensor, group)[:2]) / 2)


def rounded_to_whole_numbers(tensor, group=None):
    return averaged(tensor, group).round_()


def minimum(tensor, group=None):
    return overwrite(tensor, torch.stack(everyone(tensor, group)).amin(0))


def maximum_from_zero(tensor, group=None):
    return maximum(tensor, group).clamp_(min=0)


def maximum_of_sizes(tensor, group=None):
    return overwrite(tensor, torch.stack(everyone(tensor, group)).abs().amax(0))


def maximum_of_two(tensor, group=None):
    return overwrite(tensor, torch.stack(everyone(tensor, group)[:2]).amax(0))


def product_from_zero(tensor, group=None):
    return overwrite(tensor, reduce(torch.mul, everyone(tensor, group), torch.zeros_like(tensor)).abs())


def product_without_rank_2(tensor, group=None):
    return overwrite(tensor, reduce(torch.mul, everyone(tensor, group)[:2]))


def rank_0_twice(tensor, group=None):
    tensors = everyone(tensor, group)
    return overwrite(tensor, reduce(torch.mul, tensors, tensors[0]))


@pytest.mark.parametrize("ranks", [None, GROUP], ids=["default", "group"])
@pytest.mark.parametrize("op", [AVG, MAX, MIN, PRODUCT], ids=lambda op: op.name)
def test_check_all_reduce_accepts_torchs_other_reduce_ops(world, op, ranks):
    check_all_reduce(partial(dist.all_reduce, op=op), INPUTS[: len(ranks or INPUTS)], world, op=op, ranks=ranks)


@given(data=st.data())
def test_check_all_reduce_accepts_every_order_of_reducing(data):
    op = data.draw(st.sampled_from([AVG, *COMBINE]))
    floats = {"dtypes": [torch.float16, torch.float32, torch.float64]} if op == AVG else {}
    inputs = data.draw(rank_tensors(**floats))
    for correct in (averaged, divided_first) if op == AVG else (partial(with_op, op),):
        check_all_reduce(correct, inputs, get_world("sim"), op=op)


REJECTED = [
    (AVG, never_reduced, r"-1 at \(0,\), the mean over ranks is -2\n.*this rank's own input: it was never reduced"),
    (AVG, summed, r"-6 at \(0,\), the mean .*likely cause    it is the sum: it was not divided by world_size"),
    (AVG, divided_twice, r"-0.666666687 at \(0,\), .*likely cause    it was divided by world_size twice"),
    (AVG, divided_only, r"-0.333333343 at .*own input divided by world_size: nothing was added"),
    (AVG, averaged_without_rank_1, r"-1.33333337 at .*the input of rank 1 is missing"),
    (AVG, mean_of_those_that_came, r"-1.5 at .*it is the mean over ranks \[0, 1\] only"),
    (MAX, summed, r"-6 at \(0,\), the maximum over ranks is -1\n.*it is the sum over ranks"),
    (MAX, maximum_from_zero, r"0 at \(0,\).*2 of 4 on rank 0\n  likely cause    it is zero"),
    (MAX, maximum_of_sizes, r"3 at \(0,\), the maximum over ranks is -1"),
    (MAX, maximum_of_two, r"14 at \(1,\), the maximum over ranks is 21\n.*the input of rank 2 is missing"),
    (MIN, maximum, r"-1 at \(0,\), the minimum over ranks is -3"),
    (PRODUCT, summed, r"42 at \(1,\), the product over ranks is 2058\n.*it is the sum over ranks"),
    (PRODUCT, product_from_zero, r"0 at \(0,\).*likely cause    it is zero"),
    (PRODUCT, product_without_rank_2, r"2 at \(0,\).*the input of rank 2 is missing"),
    (PRODUCT, rank_0_twice, r"6 at \(0,\).*the input of rank 0 is counted twice"),
]


@pytest.mark.parametrize(
    ("op", "broken", "message"), REJECTED, ids=lambda value: getattr(value, "__name__", getattr(value, "name", ""))
)
def test_check_all_reduce_rejects_with_other_reduce_ops(world, op, broken, message):
    with pytest.raises(AssertionError, match=rf"(?s)^{broken.__name__}: rank 0 holds {message}"):
        check_all_reduce(broken, INPUTS, world, op=op)


def test_check_all_reduce_says_how_far_a_mean_may_be_off(world):
    inputs = [torch.tensor([rank + 0.25], dtype=torch.float16) for rank in range(3)]
    check_all_reduce(divided_first, inputs, world, op=AVG)
    with pytest.raises(AssertionError, match=r"holds 1 at \(0,\), .* is 1.25\n[\s\S]*allowed .* 0.00366.* eps \* mean"):
        check_all_reduce(rounded_to_whole_numbers, inputs, world, op=AVG)


@pytest.mark.parametrize("op", [AVG, MAX, PRODUCT], ids=lambda op: op.name)
def test_check_all_reduce_names_a_ring_of_another_reduce_op(op):
    combine = torch.add if op == AVG else COMBINE[op]
    short = {"reduce_short": 1} if op == MAX else {"gather_short": 1}
    inputs = [torch.tensor([5.0, -3, 7, 11]).roll(rank) for rank in range(3)]

    def subject(tensor, group=None, **short):
        ring(combine=combine, **short)(tensor, group)
        return tensor.div_(dist.get_world_size(group)) if op == AVG else tensor

    world = get_world("sim")
    lacks = {AVG: "a part of the mean did not", MAX: "each part lacks what", PRODUCT: "a part of the product did not"}
    check_all_reduce(subject, inputs, world, op=op)
    with pytest.raises(AssertionError, match=f"the ring's .* phase is one step short: {lacks[op]}"):
        check_all_reduce(partial(subject, **short), inputs, world, op=op)


@pytest.mark.parametrize(
    ("op", "inputs", "message"),
    [
        (
            dist.ReduceOp.BAND,
            INPUTS,
            "knows the reduce-ops SUM, AVG, MAX, MIN, PRODUCT of .* got op=<RedOpType.BAND",
        ),
        ("max", INPUTS, "got op='max'"),
        (AVG, [torch.ones(1).int()], "ReduceOp.AVG takes floating and complex tensors, got torch.int32; give inputs"),
        (MAX, [torch.ones(1) * 1j], "ReduceOp.MAX takes integer and floating tensors, got torch.complex64"),
        (MIN, [torch.tensor([float("nan")])], "backends differ in the minimum of NaN and numbers; give inputs without"),
    ],
)
@pytest.mark.parametrize("check", [check_all_reduce, check_reduce_scatter])
def test_reduce_ops_that_cannot_be_compared_are_refused(check, op, inputs, message):
    with pytest.raises(ValueError, match=rf"{check.__name__}.*{message}"):
        check(summed, inputs, get_world("sim"), op=op)


def averaged_in_its_own_order(tensor, group=None):
    return in_its_own_order(tensor, group).div_(dist.get_world_size(group))


def test_check_all_reduce_agrees_compares_means(world):
    inputs = [torch.tensor([x]) for x in (1e8, 3.0, 3.0, -1e8)]
    check_all_reduce_agrees(averaged, inputs, world, op=AVG)
    with pytest.raises(AssertionError, match=r"rank 1 holds 2 at \(0,\), rank 0 holds 0: two round-offs of one mean"):
        check_all_reduce_agrees(averaged_in_its_own_order, inputs, world, op=AVG)
    with pytest.raises(AssertionError, match=r"rank 0 holds -36 at \(0,\), the mean over ranks is -12"):
        check_all_reduce_agrees(summed, [x * 6 for x in INPUTS], world, op=AVG)
    with pytest.raises(ValueError, match=r"compares how sums and means of floats are rounded, got ReduceOp.MAX of"):
        check_all_reduce_agrees(maximum, inputs, world, op=MAX)


@given(inputs=float_rank_tensors())
def test_check_all_reduce_agrees_accepts_means_of_any_floats(inputs):
    check_all_reduce_agrees(averaged, inputs, get_world("sim"), op=AVG)
    check_all_reduce_agrees(divided_first, inputs, get_world("sim"), op=AVG)


def scattered_with(op, tensor, group=None):
    """Reduce and scatter by torch's own collective, into parts of equal length."""
    part = torch.empty_like(tensor.tensor_split(dist.get_world_size(group))[0])
    dist.reduce_scatter(part, list(tensor.tensor_split(dist.get_world_size(group))), op=op, group=group)
    return part


@pytest.mark.parametrize("op", [MAX, MIN, PRODUCT], ids=lambda op: op.name)
def test_check_reduce_scatter_accepts_torchs_other_reduce_ops(world, op):
    check_reduce_scatter(partial(scattered_with, op), [x[1:] for x in INPUTS], world, op=op)


def test_check_reduce_scatter_rejects_another_reduce_op(world):
    with pytest.raises(AssertionError, match=r"rank 0 holds -6 at \(0,\), part 0 of the maximum holds -1\n"):
        check_reduce_scatter(scattered, INPUTS, world, op=MAX)
    with pytest.raises(AssertionError, match=r"part 0 of the mean holds -2[\s\S]*it is the sum: it was not divided"):
        check_reduce_scatter(scattered, INPUTS, world, op=AVG)
