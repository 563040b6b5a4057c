"""The checks of gradients and trajectories reject broken subjects, name the cause, and accept the correct twin."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import (
    check_average_parameters,
    check_gradients_equal_single_process,
    check_same_start,
    check_same_trajectory,
    check_world_size_does_not_matter,
)
from pdlcheck.errors import CheckFailed, Inconclusive

MSE = nn.MSELoss()
X = torch.tensor([[1.0, 2], [3, -1], [2, 2], [-1, 1], [0.5, -2], [1, -3]])
Y = torch.tensor([[1.0], [-2], [0.5], [3], [-1], [2]])
EVEN = [(X[:2], Y[:2]), (X[2:4], Y[2:4]), (X[4:], Y[4:])]
UNEVEN = [(X[:1], Y[:1]), (X[1:3], Y[1:3]), (X[3:], Y[3:])]
EMPTY = [(X[:2], Y[:2]), (X[2:2], Y[2:2]), (X[2:], Y[2:])]


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))


class Gated(nn.Module):
    """A model whose second branch is used only for samples with a positive second feature."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(2, 1)
        self.sometimes = nn.Linear(2, 1)

    def forward(self, x):
        y = torch.tanh(self.always(x))
        chosen = (x[:, 1] > 0).unsqueeze(1)
        return y + self.sometimes(x) * chosen if chosen.any() else y


def grads(model):
    """Yield the gradient of every parameter, and set it to zeros if there is none."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        yield parameter.grad


def weighted(model, num_samples):
    total = torch.tensor(num_samples)
    dist.all_reduce(total)
    for grad in grads(model):
        grad *= num_samples / total.item()
        dist.all_reduce(grad)


def mean(model, num_samples):
    for grad in grads(model):
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def without_division(model, num_samples):
    for grad in grads(model):
        dist.all_reduce(grad)


def divided_twice(model, num_samples):
    mean(model, num_samples)
    for grad in grads(model):
        grad /= dist.get_world_size()


def never(model, num_samples):
    pass


def from_rank_0(model, num_samples):
    for grad in grads(model):
        dist.broadcast(grad, 0)


def without_rank_1(model, num_samples):
    for grad in grads(model):
        if dist.get_rank() == 1:
            grad.zero_()
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def zeroed(model, num_samples):
    mean(model, num_samples)
    model.zero_grad()


def without_the_last(model, num_samples):
    for grad in list(grads(model))[:-1]:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def forgets_the_count(model, num_samples):
    weighted(model, num_samples)
    for grad in grads(model):
        grad *= 6


def by_its_own_samples(model, num_samples):
    """Add the gradients of all samples, and divide by the number of this rank's own samples."""
    for grad in grads(model):
        grad *= num_samples
        dist.all_reduce(grad)
        grad /= max(num_samples, 1)


def by_its_own_samples_and_ranks(model, num_samples):
    by_its_own_samples(model, num_samples)
    for grad in grads(model):
        grad /= dist.get_world_size()


def only_what_this_rank_has(model, num_samples):
    """Average over the ranks that have a gradient, and leave out the others."""
    for parameter in model.parameters():
        there = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(there)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= max(there.item(), 1)


def off_by_a_little(model, num_samples):
    mean(model, num_samples)
    if dist.get_rank() == 2:
        model[0].weight.grad[1, 0] *= 1 + 1e-6


@pytest.mark.parametrize("shards", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("make", [net, Gated])
def test_check_gradients_accepts_the_mean_weighted_by_samples(world, make, shards):
    check_gradients_equal_single_process(make, MSE, shards, weighted, world)


@pytest.mark.parametrize("make", [net, Gated])
def test_check_gradients_accepts_a_plain_mean_of_even_shards_and_a_sum_of_sums(world, make):
    check_gradients_equal_single_process(make, MSE, EVEN, mean, world)
    check_gradients_equal_single_process(make, nn.MSELoss(reduction="sum"), EMPTY, without_division, world)


class Unused(nn.Module):
    """A model with a parameter that no sample uses; a sync may leave None or zeros there."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 1)
        self.unused = nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def weighted_without_none(model, num_samples):
    weighted(model, num_samples)


def weighted_and_none(model, num_samples):
    weighted(model, num_samples)
    for parameter in model.unused.parameters():
        parameter.grad = None


@pytest.mark.parametrize("correct", [weighted_without_none, weighted_and_none])
def test_check_gradients_takes_none_for_zero(world, correct):
    check_gradients_equal_single_process(Unused, MSE, UNEVEN, correct, world)


def rows(*cases):
    """Parametrize a test over broken subjects; the id of each case is the name of its subject."""
    values = [pytest.param(*case, id=case[0].__name__) for case in cases]
    return pytest.mark.parametrize(("broken", "make", "shards", "message"), values)


@rows(
    (without_division, net, EVEN, "world_size = 3 times too large: summed, not averaged"),
    (divided_twice, net, EVEN, "world_size = 3 times too small: divided once too often"),
    (never, net, EVEN, "the gradient of this rank's own shard: it was never synchronised"),
    (from_rank_0, net, EVEN, "own shard: it was never synchronised|rank 0's shard: copied"),
    (without_rank_1, net, EVEN, "the shard of rank 1 is missing"),
    (zeroed, net, EVEN, "it is zero, or None: gradients were lost"),
    (forgets_the_count, net, UNEVEN, "it is 6 times too large: not divided by the samples"),
    (by_its_own_samples, net, UNEVEN[::-1], "it is divided by the 3 sample.s. of this rank, where all ranks have 6\n"),
    (by_its_own_samples_and_ranks, net, UNEVEN[::-1], "it is divided by world_size times the 3 sample.s. of this rank"),
    (mean, net, UNEVEN, "it is the plain mean over ranks: shards are uneven, weight them"),
    (mean, net, EMPTY, "it is the plain mean over ranks: shards are uneven, weight them"),
    (only_what_this_rank_has, Gated, EVEN, "of the gradient of 'sometimes.weight', one process"),
    (without_the_last, net, EVEN, r"of the gradient of '2.bias'[\s\S]*  1 of 4 on every rank: '2.bias'\n"),
)
def test_check_gradients_rejects(world, broken, make, shards, message):
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: rank 0 holds [\s\S]*{message}"):
        check_gradients_equal_single_process(make, MSE, shards, broken, world)


def in_a_subgroup(groups, divided_by):
    """Return a sync within subgroups, which confuses the tensor-parallel group with the group of the replicas."""

    def sync(model, num_samples):
        made = {ranks: dist.new_group(ranks) for ranks in groups}
        mine = next(group for ranks, group in made.items() if dist.get_rank() in ranks)
        for grad in grads(model):
            dist.all_reduce(grad, group=mine)
            grad /= divided_by

    return sync


@pytest.mark.parametrize(
    ("groups", "divided_by", "cause"),
    [
        ([(0, 1), (2, 3)], 2, "ranks 0, 1 are in it, as a mean: it"),
        ([(0, 2), (1, 3)], 2, "ranks 0, 2 are in it, as a mean: it"),
        ([(0, 1), (2, 3)], 1, "ranks 0, 1 are in it, as a sum: it"),
        ([(0, 1), (2, 3)], 4, "ranks 0, 1 are in it, as a sum divided by world_size: it"),
    ],
)
def test_check_gradients_tells_the_subgroup(world, groups, divided_by, cause):
    shards = [(X[i : i + 1], Y[i : i + 1]) for i in range(4)]
    check_gradients_equal_single_process(net, MSE, shards, mean, world)
    with pytest.raises(AssertionError, match=f"only the shards of {cause} was synchronised in a sub-group"):
        check_gradients_equal_single_process(net, MSE, shards, in_a_subgroup(groups, divided_by), world)


def diagnosed(sync, shards, world):
    with pytest.raises(CheckFailed) as caught:
        check_gradients_equal_single_process(net, MSE, shards, sync, world)
    return caught.value


def test_causes_that_lead_to_the_same_gradients_are_both_named(world):
    one_sample_each = [(X[:1], Y[:1]), (X[1:2], Y[1:2])]
    assert diagnosed(divided_twice, one_sample_each, world).cause == (
        "2 causes fit: (1) it is world_size = 2 times too small: divided once too often; "
        "(2) it is 2 times too small: divided by the samples again"
    )
    assert (
        diagnosed(without_division, EVEN, world).cause == "it is world_size = 3 times too large: summed, not averaged"
    )


def test_gradients_of_zero_fit_no_factor(world):
    assert diagnosed(zeroed, EVEN, world).cause == "it is zero, or None: gradients were lost"


def test_gradients_that_no_cause_explains_have_none(world):
    def noise(model, num_samples):
        for number, grad in enumerate(grads(model)):
            grad.copy_(torch.arange(grad.numel()).reshape(grad.shape) + number)

    error = diagnosed(noise, EVEN, world)
    assert error.cause is None
    assert 'likely cause     no known cause fits; excluded: "zero, or None", "world_size = 3 times too ' in str(error)


@pytest.mark.parametrize("turned", [False, True])
def test_right_elements_at_another_offset_are_told(world, turned):
    def copies_a_slice(model, num_samples):
        first = next(grads(model)).view(-1)
        own = first.clone()
        mean(model, num_samples)
        moved = first[1:4].flip(0) if turned else first[1:4].clone()
        first.copy_(own)
        first[:3] = moved

    cause = diagnosed(copies_a_slice, EVEN, world).cause or ""
    told = (
        "right elements are at another offset: elements 0 to 2 of '0.weight', in flat order, are those that belong to 1"
    )
    assert cause.startswith(told) != turned


def test_ranks_that_are_right_are_a_note_and_no_cause(world):
    def on_rank_0_alone(model, num_samples):
        mean(model, num_samples)
        if dist.get_rank():
            for number, grad in enumerate(grads(model)):
                grad += number + 1

    error = diagnosed(on_rank_0_alone, EVEN, world)
    assert error.cause is None
    assert "; note: they are right on rank 0 alone: what is reduced does not reach all" in str(error)


def test_check_gradients_rejects_a_millionth_on_one_rank(world):
    with pytest.raises(AssertionError, match=r"rank 2 holds \S+ at \(1, 0\) of the gradient of '0.weight'"):
        check_gradients_equal_single_process(net, MSE, EVEN, off_by_a_little, world)


def test_a_message_of_check_gradients_has_scale_and_cosine(world):
    with pytest.raises(AssertionError) as caught:
        check_gradients_equal_single_process(net, MSE, EVEN, without_division, world)
    lines = str(caught.value).splitlines()
    assert "one process on all samples holds" in lines[0]
    assert [line[2:17].strip() for line in lines[1:]] == [
        "own shards", "wrong gradients", "best fit", "likely cause", "case"
    ]  # fmt: skip
    assert "3 times the gradient of one process, cosine 1.000000" in lines[3]
    assert f"world={world.name} world_size=3 samples=[2, 2, 2] seed=0" in lines[5]


def test_nothing_to_compare_is_inconclusive(world):
    nobody = [(X[:0], Y[:0])] * 2
    with pytest.raises(Inconclusive, match="no rank has a sample"):
        check_gradients_equal_single_process(net, MSE, nobody, mean, world)

    with pytest.raises(Inconclusive, match="the gradient on all samples is zero"):
        check_gradients_equal_single_process(net, lambda x, y: x.sum() * 0, EVEN, mean, world)


# trajectories


def part(i):
    """Return this rank's part of batch ``i``; two batches of 3 samples alternate."""
    batch = slice(3 * (i % 2), 3 * (i % 2) + 3)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return X[batch].double().tensor_split(world_size)[rank], Y[batch].double().tensor_split(world_size)[rank]


def train(sync, *, momentum=0.9, average=None):
    def trained(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        for i in range(steps):
            x, y = part(i)
            optimizer.zero_grad()
            if len(x):
                MSE(model(x), y).backward()
            sync(model, len(x))
            optimizer.step()
            if average:
                average(model)

    return trained


def mean_of_models(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def test_check_same_trajectory_accepts_local_sgd_that_averages_after_every_step(world):
    check_same_trajectory(train(never, average=mean_of_models), train(mean), net, world, world_size=3)


def test_check_same_trajectory_rejects_local_sgd_that_never_averages(world):
    with pytest.raises(AssertionError, match=r"^trained: after 1 step\(s\) rank 0 holds \S+ at \(0, 0\) of parameter"):
        check_same_trajectory(train(never), train(mean), net, world, world_size=3)


@pytest.mark.parametrize("shards", [X, [X, Y, X], [(X, Y, X)]], ids=["one tensor", "tensors", "triples"])
def test_shards_are_pairs(world, shards):
    with pytest.raises(TypeError, match=r"shards has \(inputs, targets\) of each rank"):
        check_gradients_equal_single_process(net, MSE, shards, mean, world)
    check_gradients_equal_single_process(net, MSE, (pair for pair in EVEN), mean, world)


def test_a_wrapper_is_not_what_make_returns(world):
    def make():
        return DistributedDataParallel(net())

    cure = "make is called outside of the ranks and returns the plain module; a wrapper is checked by check_data_p"
    with pytest.raises(ValueError, match="Default process group") as caught:
        check_gradients_equal_single_process(make, MSE, EVEN, mean, world)
    assert cure in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="Default process group") as caught:
        check_same_trajectory(train(mean), train(mean), make, world)
    assert cure in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "check",
    [
        lambda make, world: check_gradients_equal_single_process(make, MSE, EVEN, mean, world),
        lambda make, world: check_same_trajectory(train(mean), train(mean), make, world, world_size=3),
        lambda make, world: check_world_size_does_not_matter(train(never), make, world, world_sizes=(1,)),
        lambda make, world: check_same_start(make, world),
        lambda make, world: check_average_parameters(mean_of_models, make, world, buffers=False),
    ],
)
def test_a_model_is_not_a_function_that_makes_one(world, check):
    def made_alike():
        torch.manual_seed(0)
        return net()

    check(made_alike, world)
    told = r"make must be a function that makes the model, as lambda: Sequential\(...\) is; got a Sequential itself"
    with pytest.raises(TypeError, match=told):
        check(net(), world)


def test_check_same_trajectory_says_how_far_the_weights_went(world):
    with pytest.raises(AssertionError, match=r"they went 3 times as far in this direction"):
        check_same_trajectory(train(without_division), train(mean), net, world, world_size=3)


@pytest.mark.parametrize(("optimizer", "hides"), [(torch.optim.Adam, True), (torch.optim.SGD, False)])
def test_check_same_trajectory_says_what_adam_hides(world, optimizer, hides):
    def trained(sync, model, steps):
        stepper = optimizer(model.parameters(), lr=0.1)
        for i in range(steps):
            x, y = part(i)
            stepper.zero_grad()
            MSE(model(x), y).backward()
            sync(model, len(x))
            stepper.step()

    right = functools.partial(trained, mean)
    check_same_trajectory(right, right, net, world)
    with pytest.raises(AssertionError, match=r"they went \S+ times as far") as caught:
        check_same_trajectory(functools.partial(trained, without_division), right, net, world)
    assert ("a wrong factor of all of them shows as little as this: SGD" in str(caught.value)) is hides


def test_check_same_trajectory_tells_another_direction_from_another_length(world):
    """A gradient with exchanged elements goes far, but in another direction."""

    def turned(model, num_samples):
        mean(model, num_samples)
        for grad in grads(model):
            grad.copy_(10 * grad.flip(-1))

    def cosine(broken):
        with pytest.raises(AssertionError, match=r"as far in this direction, cosine -?\d") as caught:
            check_same_trajectory(train(broken), train(mean), net, world, world_size=3, steps=1)
        return float(str(caught.value).split("cosine ")[1].split()[0].rstrip(";"))

    assert cosine(without_division) == 1.0
    assert cosine(turned) < 0.95


def test_check_same_trajectory_says_that_nothing_moved(world):
    def of_a_copy(model, steps):
        train(mean)(copy.deepcopy(model), steps)

    told = "they did not move\n  likely cause +no gradient reached the optimizer, .*, such as a copy, was trained"
    with pytest.raises(AssertionError, match=told):
        check_same_trajectory(of_a_copy, train(mean), net, world)


def test_check_same_trajectory_tells_wrong_tensors_from_those_that_are_right(world):
    """The gradient of one bias is twice too large; the reported factor is that of this bias alone."""

    def last_bias_twice(model, num_samples):
        mean(model, num_samples)
        model[-1].bias.grad *= 2

    def two_layers():
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    with pytest.raises(AssertionError, match=r"^trained: after 1 step\(s\) rank 0 holds \S+ at") as error:
        check_same_trajectory(train(last_bias_twice), train(mean), two_layers, world)
    assert "wrong tensors  1 of 4: parameter '1.bias'\n" in str(error.value)
    assert "they went 2 times as far in this direction" in str(error.value)


def test_check_same_trajectory_tells_no_way_where_the_reference_does_not_go(world):
    def moved_too(model, steps):
        train(mean)(model, steps)
        model[0].running_mean += 1.0

    def with_buffer():
        return nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 1))

    with pytest.raises(
        AssertionError, match=r"wrong tensors  1 of 6: buffer '0.running_mean'\n  likely cause   no known cause fits\n"
    ):
        check_same_trajectory(moved_too, train(mean), with_buffer, world)


def test_check_same_trajectory_sees_lost_momentum_at_the_second_step(world):
    with pytest.raises(AssertionError, match=r"after 2 step\(s\) rank 0 holds"):
        check_same_trajectory(train(mean, momentum=0), train(mean), net, world, world_size=3)


def test_check_same_trajectory_is_inconclusive_where_nothing_moves(world):
    def still(model, steps):
        pass

    with pytest.raises(Inconclusive, match="the weights that it started with"):
        check_same_trajectory(still, still, net, world)


def test_check_world_size_does_not_matter_accepts_ddp_on_even_batches(world):
    def trained(model, steps):
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        x, y = X.double().tensor_split(world_size)[rank], Y.double().tensor_split(world_size)[rank]
        for _ in range(steps):
            optimizer.zero_grad()
            MSE(wrapped(x), y).backward()
            optimizer.step()

    models = check_world_size_does_not_matter(trained, net, world, world_sizes=(1, 2, 3))
    assert len(models) == 3


def test_check_world_size_does_not_matter_accepts_the_weighted_mean(world):
    check_world_size_does_not_matter(train(weighted), net, world, world_sizes=(1, 2, 4))


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (
            without_division,
            r"after 3 step\(s\) every rank of 2 holds \S+ at \(0, 0\) of parameter .*world_size 1 holds",
        ),
        (mean, r"after 3 step\(s\) every rank of 2 holds[\s\S]*do all world sizes take the same global batches\?"),
        (never, r"replicas differ after 3 step\(s\): rank 1 holds"),
    ],
    ids=["sum", "unweighted", "never"],
)
def test_check_world_size_does_not_matter_rejects(world, sync, message):
    with pytest.raises(AssertionError, match=f"^trained: {message}"):
        check_world_size_does_not_matter(train(sync), net, world, world_sizes=(1, 2))


def test_a_gradient_of_another_shape_is_named(world):
    def sync(model, num_samples):
        for name, parameter in list(model.named_parameters()):
            part = nn.Parameter(parameter.detach().flatten()[:1].clone())
            part.grad = parameter.grad.flatten()[:1].clone()
            setattr(model, name, part)

    shards = [(torch.randn(2, 2), torch.randn(2, 3)) for _ in range(2)]
    with pytest.raises(AssertionError, match=r"sync: rank 0 holds a gradient of 'weight' of shape \(1,\), that of one"):
        check_gradients_equal_single_process(lambda: nn.Linear(2, 3), nn.MSELoss(), shards, sync, world)
