"""check_same_trajectory on trainings that are not in float64, and its message about ranks that drifted apart."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_same_trajectory, check_world_size_does_not_matter
from pdlcheck.checks.trajectories.causes import Ways, diagnose
from pdlcheck.checks.trajectories.precision import PRECISIONS
from pdlcheck.errors import CheckFailed

from ..layers_by_hand import with_a_way_back, without_a_way_back

DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def train(synchronise, model, steps, *, data=DATA, optimizer=torch.optim.SGD):
    optimizer = optimizer(model.parameters(), lr=0.1)
    for batch in data.split(8)[:steps]:
        mine = batch[dist.get_rank() :: dist.get_world_size()].to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(mine[:, :3]), mine[:, 3:]).backward()
        for parameter in model.parameters():
            synchronise(parameter)
        optimizer.step()


def plainly(model, steps, data=DATA):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data.split(8)[:steps]:
        batch = batch.to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[:, :3]), batch[:, 3:]).backward()
        optimizer.step()


def mean(parameter):
    parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad)


def mean_in(dtype, parameter):
    """Average in ``dtype``, as main gradients, reduce_dtype and communication hooks do."""
    total = parameter.grad.to(dtype) / dist.get_world_size()
    dist.all_reduce(total)
    parameter.grad.copy_(total)


def total(parameter):
    dist.all_reduce(parameter.grad)


def twice_divided(parameter):
    mean(parameter)
    parameter.grad /= dist.get_world_size()


def never(parameter):
    pass


def training(synchronise):
    return functools.partial(train, synchronise)


REDUCED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@pytest.mark.parametrize("dtype", REDUCED, ids=REDUCED.values())
def test_a_training_that_reduces_in_a_narrow_dtype_passes_where_that_is_said(world, dtype):
    narrow = training(functools.partial(mean_in, dtype))
    told = {torch.float32: "rounding in float32", torch.bfloat16: "computes or sends in a narrower dtype, which dtype="}
    check_same_trajectory(narrow, plainly, net, world, dtype=dtype)
    with pytest.raises(AssertionError, match=rf"train: after 1 step[\s\S]*{told.get(dtype, '')}"):
        check_same_trajectory(narrow, plainly, net, world)


def test_rounding_in_float32_is_called_that_with_the_cure(world):
    with pytest.raises(AssertionError) as raised:
        check_same_trajectory(training(functools.partial(mean_in, torch.float32)), plainly, net, world)
    assert "without Adam and clipping, rounding in float32" in str(raised.value)
    assert "pass dtype=torch.float32" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float64, *REDUCED])
@pytest.mark.parametrize(
    ("synchronise", "cause"),
    [
        (total, "as world_size is 2: gradients are summed, not averaged, over ranks"),
        (twice_divided, "as world_size is 2: gradients are divided by it,"),
        (
            never,
            "ranks went apart: their optimizers got different gradients of parameter '0.weight' and 3 more; no rank",
        ),
    ],
    ids=["total", "twice divided", "never"],
)
def test_a_wrong_gradient_shows_in_every_dtype_with_its_cause(world, synchronise, cause, dtype):
    with pytest.raises(AssertionError) as raised:
        check_same_trajectory(training(synchronise), plainly, net, world, steps=1, dtype=dtype)
    assert cause in str(raised.value)
    assert ("ranks  " in str(raised.value)) == (synchronise is never)
    assert (f"dtype={dtype}" in str(raised.value)) == (dtype != torch.float64)


def weighted(parameter):
    """Weigh the gradient by this rank's share of the samples, and add over ranks."""
    parameter.grad *= len(range(dist.get_rank(), 8, dist.get_world_size())) / 8
    dist.all_reduce(parameter.grad)


def one_is_another(parameter):
    mean(parameter)
    if parameter.dim() == 1:
        parameter.grad[:1] *= 3


def test_a_mean_over_uneven_shares_is_told_from_other_faults(world):
    """A plain mean over uneven shares changes all weights, on all ranks in the same way."""
    told = "ranks have wrong weights: each counts 0.333 times in the gradient, but 0.375, 0.375 and 0.25 times in that"
    check_same_trajectory(training(weighted), plainly, net, world, world_size=3)
    with pytest.raises(AssertionError, match=rf"\n  likely cause +{told}"):
        check_same_trajectory(training(mean), plainly, net, world, world_size=3)
    for other, world_size in ((one_is_another, 2), (never, 3)):
        with pytest.raises(AssertionError, match="train: after 1 step") as raised:
            check_same_trajectory(training(other), plainly, net, world, world_size=world_size)
        assert told not in str(raised.value)


def test_shards_that_are_scaled_by_numbers_of_their_own_are_told(world):
    def by_halves(parameter):
        mean(parameter)
        parameter.grad.view(-1)[len(parameter.view(-1)) // 2 :] *= 0.75

    told = "ranks agree, and each element went 0.75 or 1 times as far: parts were scaled by numbers of their own, as sh"
    with pytest.raises(AssertionError, match=rf"\n  likely cause +{told}"):
        check_same_trajectory(training(by_halves), plainly, net, world)


@pytest.mark.parametrize(("factor", "said"), [(0.0, True), (0.5, False)])
def test_elements_that_keep_their_start_are_told_from_scaled_ones(world, factor, said):
    def half(parameter):
        mean(parameter)
        parameter.grad.view(-1)[len(parameter.view(-1)) // 2 :] *= factor

    with pytest.raises(CheckFailed) as raised:
        check_same_trajectory(training(half), plainly, net, world)
    assert ("ranks agree, and 21 elements keep their start, while all others of these" in raised.value.cause) == said


def test_batch_norm_that_sees_the_samples_of_a_rank_is_told(world):
    def make():
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    told = (
        "ranks hold another buffer each: .*; what normalises by a batch, as batch norm does in training, sees a rank's"
    )
    with pytest.raises(AssertionError, match=rf"\n  likely cause +{told}"):
        check_same_trajectory(training(mean), plainly, make, world)


class CentredOverRanks(nn.Module):
    """A layer that subtracts the mean over the samples of all ranks; ``total`` adds over ranks."""

    def __init__(self, total):
        super().__init__()
        self.total = total

    def forward(self, x):
        if not dist.is_initialized() or x.shape[0] == 8:
            return x - x.mean(0)
        return x - self.total(x.sum(0)) / 8


@pytest.mark.parametrize("total", [with_a_way_back, without_a_way_back], ids=lambda one: one.__name__)
def test_a_collective_without_a_backward_pass_is_told_by_what_comes_before_it(world, total):
    def make():
        return nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), CentredOverRanks(total), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
        )

    if total is with_a_way_back:
        check_same_trajectory(training(mean), plainly, make, world)
        return
    told = (
        "ranks agree, and parameter '3.weight' and what comes after it are right: the way back from there to parameter"
    )
    with pytest.raises(AssertionError, match=rf"\n  likely cause +{told} '0.bias' is cut or wrong, as by a collective"):
        check_same_trajectory(training(mean), plainly, make, world)


def five_times(parameter):
    mean_in(torch.float64, parameter)
    parameter.grad *= 5


def a_seventh(parameter):
    mean_in(torch.float64, parameter)
    parameter.grad /= 7


@pytest.mark.parametrize(
    ("synchronise", "cause"),
    [
        (
            five_times,
            "the gradients are 5 times as large: a loss that is a sum over so many samples or micro-batches where",
        ),
        (a_seventh, "the gradients are 7 times too small: divided by so many samples or micro-batches once too often"),
    ],
)
def test_a_whole_number_that_is_not_that_of_ranks_is_told(world, synchronise, cause):
    with pytest.raises(AssertionError) as raised:
        check_same_trajectory(training(synchronise), plainly, net, world, steps=1)
    assert cause in str(raised.value)


@pytest.mark.parametrize(("number", "said"), [(2, True), (3, False)])
def test_a_division_by_the_ranks_of_a_group_is_told_where_groups_may_have_so_many(world, number, said):
    def divided_again(parameter):
        mean_in(torch.float64, parameter)
        parameter.grad /= number

    with pytest.raises(CheckFailed) as raised:
        check_same_trajectory(training(divided_again), plainly, net, world, steps=1, world_size=4)
    assert f"the gradients are {number} times too small: divided by so many samples or" in raised.value.cause
    assert (
        raised.value.cause.endswith(f", or by the {number} ranks of a group, as along one dimension of a mesh") == said
    )


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2.0, "the gradients are 2 times as large: not divided, as by the 2 ranks of a group"),
        (1 / 3, "the gradients are 3 times too small: divided once too often"),
        (4.0, "as world_size is 4: gradients are summed, not averaged, over ranks"),
    ],
)
def test_a_factor_of_some_parameters_is_no_factor_of_the_whole_loss(world, factor, cause):
    def scaled_in_one_layer(parameter):
        mean_in(torch.float64, parameter)
        if parameter.shape == (8, 3):
            parameter.grad *= factor

    with pytest.raises(CheckFailed) as raised:
        check_same_trajectory(training(scaled_in_one_layer), plainly, net, world, steps=1, world_size=4)
    assert raised.value.cause.startswith(f"{cause}; the other parameters are right, so not the whole loss is wrong")


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("centre", torch.zeros(3))


def centred(factor, model, steps):
    """Train, and follow the mean of all samples in a buffer."""
    for batch in DATA.split(8)[:steps]:
        model.weight.data -= 0.1
        centre = batch[dist.get_rank() :: dist.get_world_size(), :3].mean(0)
        dist.all_reduce(centre)
        model.centre += factor * centre / dist.get_world_size()


def of_one_and_a_half(parameter):
    mean(parameter)
    parameter.grad *= 1.5


def test_any_other_factor_is_told_with_what_may_make_it(world):
    one = functools.partial(train, of_one_and_a_half)
    cause = "likely cause +all gradients that the optimizer got are those of plainly times 1.5: .*: a loss scaled"
    with pytest.raises(AssertionError, match=rf"they went 1.5 times as far in .*\n.*{cause}"):
        check_same_trajectory(one, plainly, net, world, steps=1)


@pytest.mark.parametrize(("factor", "cause"), [(2.0, "statistics are summed, not averaged"), (0.5, "divided by it")])
def test_where_buffers_alone_are_wrong_nothing_is_said_of_gradients(world, factor, cause):
    right = functools.partial(centred, 1.0)
    check_same_trajectory(right, right, Centred, world)
    with pytest.raises(AssertionError, match="wrong tensors  1 of 2: buffer 'centre'") as raised:
        check_same_trajectory(functools.partial(centred, factor), right, Centred, world)
    assert f"as world_size is 2: statistics are {cause.removeprefix('statistics are ')}" in str(raised.value)
    assert "gradients" not in str(raised.value)


def only_on_rank_0(model, steps):
    train(mean, model, steps)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model[0].bias.add_(1.0)


def test_the_ranks_that_went_apart_are_named_with_what_they_hold(world):
    with pytest.raises(AssertionError, match=r"ranks +rank 0 holds \S+ at \(\d,\) of parameter '0.bias', rank 1 holds"):
        check_same_trajectory(only_on_rank_0, plainly, net, world)


def test_data_in_float32_are_told_with_both_cures_and_pass_with_one(world):
    def ours(model, steps):
        narrow = DATA.float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in narrow.split(8)[:steps]:
            mine = batch[dist.get_rank() :: dist.get_world_size()]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(mine[:, :3]), mine[:, 3:]).backward()
            for parameter in model.parameters():
                mean(parameter)
            optimizer.step()

    with pytest.raises(RuntimeError) as raised:
        check_same_trajectory(ours, plainly, net, world)
    told = "the check gives float64 weights; give float64 data too, or pass dtype=torch.float32"
    assert any(told in note for note in raised.value.__notes__)
    check_same_trajectory(ours, plainly, net, world, dtype=torch.float32)


def test_world_sizes_are_compared_in_float32_too(world):
    def right(model, steps):
        train(mean, model, steps, data=DATA.float())

    check_world_size_does_not_matter(right, net, world, world_sizes=(1, 2), dtype=torch.float32)
    wrong = training(total)
    with pytest.raises(AssertionError, match="after 3 step"):
        check_world_size_does_not_matter(wrong, net, world, world_sizes=(1, 2), dtype=torch.float32)


@pytest.mark.parametrize("zeroes", [True, False])
def test_what_a_step_leaves_to_the_next_is_told_from_what_is_wrong_in_each(world, zeroes):
    def training(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DATA.split(8)[:steps]:
            mine = batch[dist.get_rank() :: dist.get_world_size()]
            if zeroes:
                optimizer.zero_grad()
            nn.functional.mse_loss(model(mine[:, :3]), mine[:, 3:]).backward()
            for parameter in model.parameters():
                mean(parameter)
            optimizer.step()

    if zeroes:
        check_same_trajectory(training, plainly, net, world)
        return
    with pytest.raises(CheckFailed, match=r"after 2 step\(s\) rank 0 .*") as raised:
        check_same_trajectory(training, plainly, net, world)
    assert raised.value.cause.startswith(
        "the gradients of step 2 are the right ones and those of step 1 again: no zero"
    )


def in_parts(cut, model, steps):
    train(mean, model, steps)
    weight = cut(model[0].weight.detach()).chunk(dist.get_world_size())[dist.get_rank()]
    model[0].weight = nn.Parameter(weight.clone())


@pytest.mark.parametrize(
    ("cut", "shape", "cause"),
    [
        (torch.flatten, r"\(12,\)", "in a flat tensor, as FSDP1 does"),
        (torch.clone, r"\(4, 3\)", "parts that are DTensors are compared whole"),
    ],
    ids=["flat", "rows"],
)
def test_a_part_of_a_tensor_is_no_tensor_to_compare(world, cut, shape, cause):
    words = rf"holds parameter '0.weight' of shape {shape}, plainly holds one of \(8, 3\)(.|\n)*{cause}"
    with pytest.raises(AssertionError, match=words):
        check_same_trajectory(functools.partial(in_parts, cut), plainly, net, world)


def test_a_dtype_that_no_training_has_is_refused(world):
    with pytest.raises(ValueError, match=r"check_same_trajectory takes as dtype .* torch.bfloat16; got torch.int64"):
        check_same_trajectory(training(mean), plainly, net, world, dtype=torch.int64)


def ways(went, *, world_size=2, right=(1.0, 2.0), **more):
    right = torch.tensor(right, dtype=torch.float64)
    fields = {"apart": None, "of_buffers": False, "what": "plainly", "wrong": ["parameter 'a'"], "learned": []}
    return Ways(right, right * went, PRECISIONS[torch.float64], world_size, **(fields | more))


@pytest.mark.parametrize(
    ("went", "more", "cause"),
    [
        (3.0, {"world_size": 3}, "as world_size is 3: gradients are summed"),
        (1 / 3, {"world_size": 3}, "as world_size is 3: gradients are divided by it"),
        (0.0, {}, "no gradient reached the optimizer"),
        (1.0001, {"world_size": 1}, None),  # one rank: no sum differs from a mean
        (2.0, {"right": (0.0, 0.0)}, None),  # any factor of zero is zero
    ],
)
def test_a_factor_of_zero_or_one_is_a_case_of_its_own(went, more, cause):
    found = diagnose(ways(went, **more)).cause
    assert found is None if cause is None else found.startswith(cause)


def test_what_a_later_step_shows_is_a_note():
    diagnosis = diagnose(ways(torch.tensor([1.0, -1.0])), otherwise="all was right after 1 step(s)")
    assert diagnosis.cause is None
    assert str(diagnosis).endswith("; note: all was right after 1 step(s)")
