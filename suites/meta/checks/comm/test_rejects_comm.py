"""The checks of collectives reject broken ones, name the cause, and accept the correct twin."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from pdlcheck.checks import (
    check_all_gather,
    check_all_reduce,
    check_all_reduce_agrees,
    check_broadcast,
    check_reduce_scatter,
    check_ring_pass,
)
from pdlcheck.checks.rank_results import possible_order
from pdlcheck.checks.strategies import rank_tensors
from pdlcheck.errors import CheckFailed, Deadlock
from pdlcheck.worlds import get_world

from .collectives_by_hand import (
    along_the_last_dimension,
    averaged,
    copied,
    everyone,
    in_its_own_order,
    maximum,
    never_reduced,
    overwrite,
    ring,
    scattered,
    shifted_by_one,
    summed,
)

INPUTS = [torch.tensor([10.0, 20, 30, 40]) + rank + 1 for rank in range(3)]
GROUP = possible_order([3, 1])


def rows(*cases, names=("broken", "message")):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
    return pytest.mark.parametrize(names, [pytest.param(*case, id=case[0].__name__) for case in cases])


# all_reduce


def reduced_twice(tensor, group=None):
    return summed(summed(tensor, group), group)


def scaled(tensor, group=None):
    return tensor.mul_(dist.get_world_size(group))


def without_rank_1(tensor, group=None):
    tensors = everyone(tensor, group)
    return overwrite(tensor, sum(tensors) - tensors[1])


def rank_1_twice(tensor, group=None):
    tensors = everyone(tensor, group)
    return overwrite(tensor, sum(tensors) + tensors[1])


def copied_from_rank_2(tensor, group=None):
    return overwrite(tensor, everyone(tensor, group)[2])


def summed_into_a_copy(tensor, group=None):
    return sum(everyone(tensor, group))


def without_gather_phase(tensor, group=None):
    """Run a reduce-scatter only, so that each rank has the sum of its own part."""
    rank, total = dist.get_rank(group), sum(everyone(tensor, group))
    tensor.tensor_split(dist.get_world_size(group))[rank].copy_(total.tensor_split(dist.get_world_size(group))[rank])
    return tensor


def stops_one_step_early(tensor, group=None):
    tensors, rank = everyone(tensor, group), dist.get_rank(group)
    return overwrite(tensor, tensors[rank] + tensors[rank - 1])


def wrong_on_the_last_element(tensor, group=None):
    summed(tensor, group)
    tensor[-1] -= 1
    return tensor


def wrong_on_rank_2_only(tensor, group=None):
    summed(tensor, group)
    if dist.get_rank(group) == 2:
        tensor += 1
    return tensor


def to_float64(tensor, group=None):
    tensor.data = sum(everyone(tensor, group)).double()


def of_the_default_group(tensor, group=None):
    """Return a wrong sum if a group is given.

    A reduction over the default group itself would wait for every rank of the world.
    """
    tensors = everyone(tensor, group)
    return overwrite(tensor, sum(tensors) if group is None else tensors[0])


SHORT = {
    "reduce": ({"reduce_short": 1}, "the ring's reduce phase is one step short: each part lacks what the last step"),
    "gather": ({"gather_short": 1}, "the ring's gather phase is one step short: a part of the sum did not arrive"),
    "both": ({"reduce_short": 1, "gather_short": 1}, "both phases of the ring are one step short"),
}


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("kind", SHORT)
def test_check_all_reduce_names_a_ring_that_is_one_step_short(kind, way, world_size):
    world = get_world("sim")
    inputs = [torch.randint(-50, 50, (2, 5), generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    short, cause = SHORT[kind]
    for more in ({}, {"first": 1}, {"split": torch.chunk}):
        check_all_reduce(ring(way=way, **more), inputs, world)
        if kind == "both" and world_size == 2:
            cause = "it is this rank's own input: it was never reduced"
        with pytest.raises(AssertionError, match=f"likely cause    {cause}"):
            check_all_reduce(ring(way=way, **short, **more), inputs, world)


@pytest.mark.parametrize("ranks", [None, GROUP], ids=["default", "group"])
@pytest.mark.parametrize("correct", [summed, dist.all_reduce])
def test_check_all_reduce_accepts(world, correct, ranks):
    check_all_reduce(correct, INPUTS[: len(ranks or INPUTS)], world, ranks=ranks)


@rows(
    (
        never_reduced,
        r"rank 0 holds 11 at \(0,\), the sum over ranks is 36[\s\S]*own input: it was never reduced",
    ),
    (
        averaged,
        r"rank 0 holds 12 at \(0,\), the sum over ranks is 36[\s\S]*divided by world_size: a mean",
    ),
    (reduced_twice, r"rank 0 holds 108 at \(0,\)[\s\S]*world_size times the sum: it was reduced twice"),
    (scaled, r"rank 0 holds 33 at \(0,\)[\s\S]*world_size times this rank's own input"),
    (without_rank_1, r"rank 0 holds 24 at \(0,\)[\s\S]*the input of rank 1 is missing"),
    (rank_1_twice, r"rank 0 holds 48 at \(0,\)[\s\S]*the input of rank 1 is counted twice"),
    (maximum, r"rank 0 holds 13 at \(0,\)[\s\S]*input of rank 2: copied|maximum over ranks"),
    (copied_from_rank_2, r"rank 0 holds 13 at \(0,\)[\s\S]*it is the input of rank 2: copied, not added"),
    (summed_into_a_copy, r"rank 0 returned something else than its argument holds[\s\S]*works on a copy"),
    (
        without_gather_phase,
        r"rank 0 holds 31 at \(2,\), the sum over ranks is 96\n"
        r"  contributions   rank 0: 31, rank 1: 32, rank 2: 33\n"
        r"  wrong elements  2 of 4 on rank 0\n"
        r"  likely cause    it is this rank's own input: it was never reduced\n"
        r"  case            world=\w+ world_size=3 shape=\(4,\) dtype=torch.float32",
    ),
    (stops_one_step_early, r"rank 0 holds 24 at \(0,\)[\s\S]*the input of rank 1 is missing"),
    (
        wrong_on_the_last_element,
        r"rank 0 holds 125 at \(3,\), the sum over ranks is 126[\s\S]*1 of 4 on rank 0",
    ),
    (wrong_on_rank_2_only, r"rank 2 holds 37 at \(0,\), the sum over ranks is 36"),
    (to_float64, r"rank 0 holds shape \(4,\) and torch.float64, expected shape \(4,\) and torch.float32"),
)
def test_check_all_reduce_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: {message}"):
        check_all_reduce(broken, INPUTS, world)


def test_check_all_reduce_rejects_a_function_that_forgets_its_group(world):
    check_all_reduce(of_the_default_group, INPUTS, world)
    with pytest.raises(AssertionError, match=r"rank 0 holds 11 at \(0,\), the sum over ranks is 23"):
        check_all_reduce(of_the_default_group, INPUTS[:2], world, ranks=GROUP)


def test_check_all_reduce_tells_functions_in_place_from_those_that_return(world):
    check_all_reduce(summed_into_a_copy, INPUTS, world, in_place=False)
    with pytest.raises(AssertionError, match=r"rank 0 holds 36 at \(0,\) of its argument, 11 was there before"):
        check_all_reduce(summed, INPUTS, world, in_place=False)
    with pytest.raises(AssertionError, match="lambda>: rank 0 returned NoneType, expected a tensor"):
        check_all_reduce(lambda tensor: None, INPUTS, world, in_place=False)


def summed_if_contiguous(tensor, group=None):
    """Sum in place, or in the copy of a view: a function of which only the returned value is the result."""
    flat = tensor.contiguous()
    dist.all_reduce(flat, group=group)
    return flat


def scattered_in_place(tensor, group=None):
    return summed(tensor, group).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def test_a_result_that_is_returned_may_overwrite_the_argument_or_not(world):
    for inputs in (INPUTS, [torch.stack([one, one], 1)[:, 0] for one in INPUTS]):
        check_all_reduce(summed_if_contiguous, inputs, world, in_place=None)
        with pytest.raises(AssertionError, match=r"rank 0 holds 11 at .*, the sum over ranks is 36"):
            check_all_reduce(lambda tensor: tensor.clone(), inputs, world, in_place=None)
    with pytest.raises(AssertionError, match=r"adds into its argument.*\n  do +pass in_place=None if callers use"):
        check_all_reduce(summed_if_contiguous, INPUTS, world, in_place=False)
    check_reduce_scatter(scattered_in_place, INPUTS, world, in_place=None)
    with pytest.raises(AssertionError, match=r"rank 0 holds 36 at \(0,\) of its argument"):
        check_reduce_scatter(scattered_in_place, INPUTS, world)


def test_check_all_reduce_agrees_rejects_sums_that_differ_in_the_last_bit(world):
    inputs = [torch.tensor([x]) for x in (1e8, 3.0, 3.0, -1e8)]
    check_all_reduce_agrees(summed, inputs, world)
    with pytest.raises(AssertionError, match=r"rank 1 holds 8 at \(0,\), rank 0 holds 0: two round-offs[\s\S]* orders"):
        check_all_reduce_agrees(in_its_own_order, inputs, world)


def test_check_all_reduce_agrees_rejects_a_wrong_sum(world):
    with pytest.raises(AssertionError, match=r"rank 0 holds 24 at \(0,\), the sum over ranks is 36"):
        check_all_reduce_agrees(without_rank_1, INPUTS, world)


# reduce_scatter


def the_next_part(tensor, group=None):
    return sum(everyone(tensor, group)).tensor_split(dist.get_world_size(group))[dist.get_rank(group) - 1]


def its_own_part(tensor, group=None):
    return tensor.tensor_split(dist.get_world_size(group))[dist.get_rank(group)]


def scattered_and_spoilt(tensor, group=None):
    return scattered(summed(tensor, group), group)


@pytest.mark.parametrize("ranks", [None, GROUP], ids=["default", "group"])
def test_check_reduce_scatter_accepts(world, ranks):
    check_reduce_scatter(scattered, INPUTS[: len(ranks or INPUTS)], world, ranks=ranks)


@rows(
    (the_next_part, r"rank 0 holds shape \(1,\) and torch.float32, expected shape \(2,\)"),
    (
        its_own_part,
        r"rank 0 holds 11 at \(0,\), part 0 of the sum holds 36[\s\S]*own input: it was never reduced",
    ),
    (
        scattered_and_spoilt,
        r"rank 0 holds 36 at \(0,\) of its argument, 11 was there[\s\S]*clone the argument",
    ),
)
def test_check_reduce_scatter_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: {message}"):
        check_reduce_scatter(broken, INPUTS, world)


def test_check_reduce_scatter_names_the_wrong_part(world):
    inputs = [x[:3] for x in INPUTS]
    with pytest.raises(AssertionError, match="it is part 2 of the sum: the wrong part"):
        check_reduce_scatter(the_next_part, inputs, world)


# all_gather


def its_own_only(tensor, group=None):
    return [tensor] * dist.get_world_size(group)


def without_the_last(tensor, group=None):
    tensors = everyone(tensor, group)
    return [*tensors[:-1], torch.zeros_like(tensor)]


@pytest.mark.parametrize("ranks", [None, GROUP], ids=["default", "group"])
def test_check_all_gather_accepts(world, ranks):
    check_all_gather(everyone, INPUTS[: len(ranks or INPUTS)], world, ranks=ranks)


@rows(
    (shifted_by_one, r"rank 0 holds 13 at \(0, 0\)[\s\S]*the rows are shifted by 1"),
    (its_own_only, r"rank 0 holds 11 at \(1, 0\)[\s\S]*these rows hold this rank's own input"),
    (along_the_last_dimension, r"rank 0 holds shape \(12,\) .* expected shape \(3, 4\)"),
    (without_the_last, r"rank 0 holds 0 at \(2, 0\)[\s\S]*these rows are zero: nothing arrived"),
)
def test_check_all_gather_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: {message}"):
        check_all_gather(broken, INPUTS, world)


# broadcast


def always_from_rank_0(tensor, src=0, group=None):
    return overwrite(tensor, everyone(tensor, group)[0])


def not_to_rank_2(tensor, src=0, group=None):
    given = tensor.clone()
    copied(tensor, src, group)
    return overwrite(tensor, given) if dist.get_rank(group) == 2 else tensor


def src_as_a_place_in_the_group(tensor, src=0, group=None):
    return overwrite(tensor, everyone(tensor, group)[src % dist.get_world_size(group)])


@pytest.mark.parametrize("ranks", [None, GROUP], ids=["default", "group"])
@pytest.mark.parametrize("correct", [copied, dist.broadcast])
def test_check_broadcast_accepts(world, correct, ranks):
    check_broadcast(correct, INPUTS[: len(ranks or INPUTS)], world, src=1, ranks=ranks)


@rows(
    (
        always_from_rank_0,
        r"rank 0 holds 11 at \(0,\), rank 1 sent 12[\s\S]*every rank holds the input of rank 0: the wrong rank sent\n",
    ),
    (not_to_rank_2, r"rank 2 holds 13 at \(0,\), rank 1 sent 12[\s\S]*own input: nothing arrived"),
    (summed, r"rank 0 holds 36 at \(0,\), rank 1 sent 12[\s\S]*it is the sum over ranks"),
)
def test_check_broadcast_rejects(world, broken, message):
    def called(tensor, src=0, group=None):
        return broken(tensor, group=group) if broken is summed else broken(tensor, src, group)

    with pytest.raises(AssertionError, match=rf"^called: {message}"):
        check_broadcast(called, INPUTS, world, src=1)


def test_check_broadcast_rejects_a_global_rank_taken_for_a_place(world):
    check_broadcast(src_as_a_place_in_the_group, INPUTS, world, src=1)
    told = (
        "every rank holds the input of rank 1: the wrong rank sent; it is number 1 in the group, and the right one is "
        "global rank 1: a global rank is used as a number in the group\n"
    )
    with pytest.raises(AssertionError, match=told):
        check_broadcast(src_as_a_place_in_the_group, INPUTS[:2], world, src=0, ranks=[1, 2])


def place_in_the_group_as_src(tensor, src=0, group=None):
    dist.broadcast(tensor, dist.get_group_rank(group, src), group)


def test_check_broadcast_rejects_a_place_taken_for_a_global_rank(world):
    told = (
        "every rank holds the input of rank 0: the wrong rank sent; it is global rank 1, and the right one is number 1 "
        "in the group, global rank 3: a number in the group is used as a global rank\n"
    )
    with pytest.raises(AssertionError, match=told):
        check_broadcast(place_in_the_group_as_src, INPUTS[:2], world, src=1, ranks=[1, 3])
    with pytest.raises(AssertionError, match="every rank holds the input of rank 0: the wrong rank sent\n"):
        check_broadcast(always_from_rank_0, INPUTS[:2], world, src=1, ranks=[1, 3])


# ring_pass


def around(tensor, group=None):
    count = dist.get_rank(group) + 1 if dist.get_rank(group) else dist.get_world_size(group)
    return overwrite(tensor, everyone(tensor, group)[0] + count)


def never_comes_home(tensor, group=None):
    return overwrite(tensor, everyone(tensor, group)[0] + dist.get_rank(group) + 1)


def rank_0_does_not_add(tensor, group=None):
    return around(tensor, group).sub_(1)


def adds_to_its_own(tensor, group=None):
    return tensor.add_(1)


def test_check_ring_pass_accepts(world):
    check_ring_pass(around, INPUTS, world)
    check_ring_pass(around, INPUTS[:2], world, ranks=GROUP)


@rows(
    (
        never_comes_home,
        r"rank 0 holds 12 at \(0,\), rank 0's input plus 3 is 14[\s\S]*own input plus 1: nothing",
    ),
    (rank_0_does_not_add, r"rank 0 holds 13 at \(0,\)[\s\S]*1 was added 2 times instead of 3"),
    (adds_to_its_own, r"rank 0 holds 12 at \(0,\)[\s\S]*own input plus 1: nothing arrived"),
)
def test_check_ring_pass_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: {message}"):
        check_ring_pass(broken, INPUTS, world)


def send_then_receive(tensor, group=None):
    """Send on every rank before any rank receives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(tensor)
    dist.send(tensor, (rank + 1) % world_size)
    dist.recv(arrived, (rank - 1) % world_size)
    return overwrite(tensor, arrived)


def test_a_ring_that_sends_before_it_receives_is_a_deadlock(world):
    with pytest.raises(Deadlock):
        check_all_reduce(send_then_receive, INPUTS, world)


@given(tensors=rank_tensors())
def test_drawn_tensors_tell_ranks_apart(tensors):
    for one, other in itertools.combinations(tensors, 2):
        assert (one != other).all()


NANS = [torch.tensor([float("nan"), rank, float("inf")]) for rank in range(3)]


def test_numbers_that_are_none_are_moved_as_they_are(world):
    """NaN is not equal to itself in torch; the checks accept NaN that arrives unchanged."""
    check_all_gather(everyone, NANS, world)
    check_broadcast(copied, NANS, world, src=1)
    check_all_reduce(summed, NANS, world)
    check_reduce_scatter(scattered, NANS, world)
    with pytest.raises(AssertionError, match=r"rank 0 holds 0 at \(0, 0\), .* gave nan"):
        check_all_gather(lambda tensor: [x.nan_to_num() for x in everyone(tensor)], NANS, world)


def test_results_that_two_causes_lead_to_name_both(world):
    """With a zero on rank 0, the sum without rank 1 is also the input of rank 2."""
    inputs = [torch.full((2,), value) for value in (0.0, 1.0, 2.0)]

    def from_rank_2(tensor):
        dist.broadcast(tensor, 2)

    with pytest.raises(CheckFailed) as caught:
        check_all_reduce(from_rank_2, inputs, world)
    assert caught.value.cause == (
        "2 causes fit: (1) the input of rank 1 is missing; (2) it is the input of rank 2: copied, not added"
    )


def test_results_that_no_cause_explains_name_what_is_excluded(world):
    def odd(tensor):
        tensor.copy_(torch.arange(tensor.numel()) * 7.5 + 1000)

    with pytest.raises(CheckFailed, match='no known cause fits; excluded: "this rank\'s own input", ') as caught:
        check_all_reduce(odd, [torch.ones(3)] * 3, world)
    assert caught.value.cause is None
