"""The checks of gradients and trajectories accept many kinds of models, and explain why they cannot compare others."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_gradients_equal_single_process, check_same_trajectory
from pdlcheck.errors import Inconclusive

MSE = nn.MSELoss()
SUM = nn.MSELoss(reduction="sum")
DRAWN = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
SHARDS = [(DRAWN[:5, :2], DRAWN[:5, 2:]), (DRAWN[5:, :2], DRAWN[5:, 2:])]


def summed(model, num_samples):
    for parameter in model.parameters():
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        dist.all_reduce(grad)
        parameter.grad = grad.to_sparse(1) if parameter.grad.is_sparse else grad


def weighted(model, num_samples):
    for parameter in model.parameters():
        parameter.grad *= num_samples / len(DRAWN)
    summed(model, num_samples)


def nothing(model, num_samples):
    pass


def dropout():
    return nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def normalised():
    return nn.Sequential(nn.Linear(2, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("sync", [weighted, nothing])
def test_a_model_that_draws_random_numbers_cannot_be_compared(world, sync):
    check_gradients_equal_single_process(lambda: dropout().eval(), MSE, SHARDS, weighted, world)
    with pytest.raises(Inconclusive, match=rf"^{sync.__name__}: the gradient of one process differs from run to run"):
        check_gradients_equal_single_process(dropout, MSE, SHARDS, sync, world)


@pytest.mark.parametrize(("loss", "sync", "what"), [(MSE, weighted, "mean"), (SUM, summed, "sum")])
def test_samples_that_see_each_other_are_told_from_a_wrong_weight(world, loss, sync, what):
    check_gradients_equal_single_process(lambda: normalised().eval(), loss, SHARDS, sync, world)
    with pytest.raises(AssertionError, match=rf"it is the {what} of what the shards give, .* as in batch norm"):
        check_gradients_equal_single_process(normalised, loss, SHARDS, sync, world)


class SyncedNorm(nn.Module):
    """Batch norm over the samples of all ranks, some of which may have none."""

    def __init__(self, statistics):
        super().__init__()
        self.statistics = statistics

    def forward(self, x):
        mean, square = self.statistics(x)
        return (x - mean) / (square - mean**2 + 1e-3).sqrt()


class SummedOverRanks(torch.autograd.Function):
    """A sum over ranks whose gradient is summed too, because every rank uses the sum."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return SummedOverRanks.forward(ctx, grad)


def over_ranks(x):
    return SummedOverRanks.apply(x) if dist.is_initialized() else x


def of_sums(x):
    count = over_ranks(torch.tensor(float(len(x))))
    return over_ranks(x.sum(0)) / count, over_ranks(x.square().sum(0)) / count


def of_means(x):
    """Return means in which every rank weighs the same; a rank without samples divides by 0."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return over_ranks(x.mean(0)) / ranks, over_ranks(x.square().mean(0)) / ranks


def with_empty_batches(model, num_samples):
    if not num_samples:
        model(torch.empty(0, 2, dtype=torch.float64)).sum().backward()
    summed(model, num_samples)


@pytest.mark.parametrize("sizes", [(6, 6), (5, 7), (5, 7, 0)])
def test_a_norm_over_ranks_is_that_of_all_samples(world, sizes):
    def net(statistics):
        return nn.Sequential(nn.Linear(2, 4), SyncedNorm(statistics), nn.Linear(4, 1))

    shards = [(part[:, :2], part[:, 2:]) for part in DRAWN.split(sizes)]
    check_gradients_equal_single_process(lambda: net(of_sums), SUM, shards, with_empty_batches, world)
    says = "rank 0 holds nan" if 0 in sizes else "one process on all samples holds"
    with nullcontext() if sizes == (6, 6) else pytest.raises(AssertionError, match=says):
        check_gradients_equal_single_process(lambda: net(of_means), SUM, shards, with_empty_batches, world)


class Attention(nn.Module):
    """Attention in which the bias of the keys changes nothing, so that its gradient is rounding alone."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1) @ self.value(x)


def test_the_round_off_of_terms_that_cancel_is_allowed_for(world):
    draws = torch.Generator().manual_seed(0)
    shards = [(torch.randn(16, 24, 4, generator=draws), 1e5 * torch.randn(16, 24, 4, generator=draws)) for _ in "ab"]
    check_gradients_equal_single_process(Attention, SUM, shards, summed, world)
    with pytest.raises(AssertionError, match="never synchronised"):
        check_gradients_equal_single_process(Attention, SUM, shards, nothing, world)


def test_gradients_may_be_as_small_as_they_like(world):
    def small(found, targets):
        return 1e-13 * MSE(found, targets)

    check_gradients_equal_single_process(lambda: nn.Linear(2, 1), small, SHARDS, weighted, world)
    with pytest.raises(AssertionError, match="never synchronised"):
        check_gradients_equal_single_process(lambda: nn.Linear(2, 1), small, SHARDS, nothing, world)


class Phases(nn.Module):
    """A model with a complex weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 1, dtype=torch.complex64))

    def forward(self, x):
        return x.to(self.weight.dtype) @ self.weight


def squares(found, targets):
    return (found - targets).abs().square().sum()


def only_real_parts(model, num_samples):
    real = model.weight.grad.real.clone()
    dist.all_reduce(real)
    model.weight.grad = torch.complex(real, model.weight.grad.imag)


def test_imaginary_parts_are_compared(world):
    check_gradients_equal_single_process(Phases, squares, SHARDS, summed, world)
    with pytest.raises(AssertionError, match=r"only_real_parts: rank 0 holds \(\S+j\) at \(0, 0\) of the gradient"):
        check_gradients_equal_single_process(Phases, squares, SHARDS, only_real_parts, world)


def test_sparse_gradients_are_compared(world):
    words = torch.tensor([[0], [1], [1], [2], [4], [0]])
    shards = [(words[:3], DRAWN[:3, None, 2:]), (words[3:], DRAWN[3:6, None, 2:])]

    def embedding():
        return nn.Embedding(5, 1, sparse=True)

    check_gradients_equal_single_process(embedding, SUM, shards, summed, world)
    with pytest.raises(AssertionError, match=r"of the gradient of 'weight'[\s\S]*never synchronised"):
        check_gradients_equal_single_process(embedding, SUM, shards, nothing, world)


def replaces_the_weight(model, num_samples):
    nn.utils.parametrizations.weight_norm(model)


def test_a_parameter_that_is_gone_is_named(world):
    with pytest.raises(AssertionError, match="rank 0 has no parameter 'weight' any more"):
        check_gradients_equal_single_process(lambda: nn.Linear(2, 1), MSE, SHARDS, replaces_the_weight, world)


def descent(model, steps, *, lr=0.1, factor=1.0, imaginary=1.0):
    for _ in range(steps):
        model.zero_grad()
        (factor * squares(model(DRAWN[:, :2].double()), DRAWN[:, 2:])).backward()
        with torch.no_grad():
            for weight in model.parameters():
                step = lr * weight.grad
                weight -= torch.complex(step.real, imaginary * step.imag) if weight.is_complex() else step


@pytest.mark.parametrize("lr", [1e-2, 1e-7, 1e-9])
def test_a_trajectory_may_be_as_short_as_it_likes(world, lr):
    def linear():
        return nn.Linear(2, 1)

    right = functools.partial(descent, lr=lr)
    check_same_trajectory(right, right, linear, world)
    with pytest.raises(AssertionError, match=r"they went 1.02 times as far"):
        check_same_trajectory(functools.partial(descent, lr=lr, factor=1.02), right, linear, world, steps=1)


def test_a_trajectory_has_imaginary_parts(world):
    check_same_trajectory(descent, descent, Phases, world)
    with pytest.raises(AssertionError, match=r"rank 0 holds \(\S+j\) at \(0, 0\) of parameter 'weight'"):
        check_same_trajectory(functools.partial(descent, imaginary=0.0), descent, Phases, world)


def test_a_weight_whose_gradient_is_round_off_may_start_at_zero(world):
    """The weight moves by rounding alone, which differs with every order of addition."""

    def attention():
        model = Attention()
        nn.init.zeros_(model.key.bias)
        return model

    def train(model, steps, *, parts):
        inputs = torch.randn(8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in range(steps):
            model.zero_grad()
            for part in inputs.chunk(parts):
                model(part).square().sum().backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 1e-3 * weight.grad

    check_same_trajectory(functools.partial(train, parts=3), functools.partial(train, parts=1), attention, world)


def test_a_trajectory_that_cannot_be_compared(world):
    def linear():
        return nn.Linear(2, 1)

    def renames(model, steps):
        nn.utils.parametrizations.weight_norm(model)

    def diverges(model, steps):
        model.weight.detach()[0, 1] = torch.nan

    with pytest.raises(AssertionError, match="rank 0 has no parameter 'weight', descent holds one"):
        check_same_trajectory(renames, descent, linear, world)
    with pytest.raises(Inconclusive, match=r"diverges holds nan at \(0, 1\) of parameter 'weight'"):
        check_same_trajectory(descent, diverges, linear, world)
    with pytest.raises(ValueError, match="it needs 1 step or more, got 0"):
        check_same_trajectory(descent, descent, linear, world, steps=0)


def sent_in(dtype):
    def sync(model, num_samples):
        for parameter in model.parameters():
            sent = (parameter.grad * num_samples / len(DRAWN)).to(dtype)
            dist.all_reduce(sent)
            parameter.grad = sent.double()

    return sync


def a_little_less(model, num_samples):
    weighted(model, num_samples)
    for parameter in model.parameters():
        parameter.grad *= 0.9995


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")]
)
def test_gradients_that_are_sent_in_a_narrower_dtype_are_told_from_a_factor(world, dtype, name):
    def model():
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    with pytest.raises(AssertionError, match=f"cause +it differs by no more than {name} rounds: "):
        check_gradients_equal_single_process(model, MSE, SHARDS, sent_in(dtype), world)
    with pytest.raises(AssertionError, match=r"best fit +0\.9995 times [^\n]*\n  likely cause +no known cause fits; "):
        check_gradients_equal_single_process(model, MSE, SHARDS, a_little_less, world)


def divided_by_one_more(model, num_samples):
    weighted(model, num_samples)
    for parameter in model.parameters():
        parameter.grad *= 2 / 3


def test_another_divisor_than_the_number_of_ranks_is_told(world):
    told = r"cause +it is 0\.666667 times what is right: as a sum over world_size = 2 ranks divided by 3\n"
    with pytest.raises(AssertionError, match=told):
        check_gradients_equal_single_process(lambda: nn.Linear(2, 1), MSE, SHARDS, divided_by_one_more, world)


def of_rank_0(model, num_samples):
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0)


def the_largest(model, num_samples):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.MAX)


def on_rank_0_alone(model, num_samples):
    weighted(model, num_samples)
    if dist.get_rank():
        for parameter in model.parameters():
            parameter.grad.sin_()


@pytest.mark.parametrize(
    ("sync", "told"),
    [
        (of_rank_0, "rank 0 holds [^$]* it is the gradient of rank 0's shard: copied, not averaged"),
        (nothing, "rank 0 holds [^$]* it is the gradient of this rank's own shard: it was never synchronised"),
        (the_largest, "rank 0 holds [^$]* each element is the largest over ranks: reduced by MAX"),
        (on_rank_0_alone, "rank 1 holds [^$]* they are right on rank 0 alone: what is reduced does not reach all"),
    ],
)
def test_what_all_ranks_hold_tells_a_copy_from_a_shard(world, sync, told):
    with pytest.raises(AssertionError, match=rf"^{sync.__name__}: {told}"):
        check_gradients_equal_single_process(lambda: nn.Linear(2, 1), MSE, SHARDS, sync, world)
