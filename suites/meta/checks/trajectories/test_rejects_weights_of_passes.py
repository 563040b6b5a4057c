"""check_same_trajectory tells how micro-batches and ranks weigh in the gradients, and finds layers that draw again."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from pdlcheck.checks import check_same_trajectory

SIZES = [5, 3, 6, 2]  # of the micro-batches
BATCH = torch.randn(sum(SIZES), 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, samples, reduction="mean"):
    return nn.functional.mse_loss(model(samples[:, :3]), samples[:, 3:], reduction=reduction)


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def parts(passes):
    """Return this rank's micro-batches."""
    rank, each = dist.get_rank(), BATCH.split(SIZES)
    return each[rank * passes : (rank + 1) * passes]


def training(losses, synchronise=average, optimizer=torch.optim.SGD):
    """Return a training: ``losses(model)`` yields the loss of each backward pass on this rank."""

    def train(model, steps):
        optimize = optimizer(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimize.zero_grad()
            for loss in losses(model):
                loss.backward()
            synchronise(model)
            optimize.step()

    return train


def of_means(passes, factor=1.0):
    return lambda model: (factor * loss_of(model, part) / passes for part in parts(passes))


def of_sums(passes, world_size):
    """Return losses that add up to the mean over all samples, where the ranks are averaged."""
    whole = sum(SIZES[: passes * world_size]) / world_size
    return lambda model: (loss_of(model, part, "sum") / whole for part in parts(passes))


def cleared_on_rank_1(model):
    first, last = of_sums(2, 2)(model)
    yield first
    if dist.get_rank() == 1:
        model.zero_grad()
    yield last


def clips_each_rank(model):
    clip_grad_norm_(model.parameters(), 0.01)
    average(model)


def clips_the_average(model):
    average(model)
    clip_grad_norm_(model.parameters(), 0.01)


def in_total(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def reference(passes, world_size, then=lambda model: None):
    def plainly(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model, BATCH[: sum(SIZES[: passes * world_size])]).backward()
            then(model)
            optimizer.step()

    return plainly


def clip(model):
    clip_grad_norm_(model.parameters(), 0.01)


ALIKE = "each counts {} times in the gradient, but {} times in that of plainly: a mean of means"
RIGHT = {
    "micro-batches": (training(of_sums(2, 1)), reference(2, 1), 1),
    "ranks": (training(of_sums(1, 2)), reference(1, 2), 2),
    "both": (training(of_sums(2, 2)), reference(2, 2), 2),
    "clipped": (training(of_sums(1, 2), clips_the_average), reference(1, 2, clip), 2),
}
WRONG = {
    "micro-batches": (training(of_means(2)), reference(2, 1), 1, ALIKE.format("1", "1.25 and 0.75")),
    "ranks": (
        training(of_means(1)),
        reference(1, 2),
        2,
        f"ranks have wrong weights: {ALIKE.format('0.5', '0.625 and 0.375')}",
    ),
    "both": (training(of_means(2)), reference(2, 2), 2, ALIKE.format("0.5", "0.625, 0.375, 0.75 and 0.25")),
    "cleared": (
        training(cleared_on_rank_1),
        reference(2, 2),
        2,
        "the gradient of backward pass 1 of rank 1 does not count in this training",
    ),
    "clipped": (
        training(of_sums(1, 2), clips_each_rank),
        reference(1, 2, clip),
        2,
        "the gradients of each rank have the norm 0.01 before they are averaged: each rank clips its own ones",
    ),
    "divided in the loss": (
        training(lambda model: (loss / 2 for loss in of_sums(1, 2)(model))),
        reference(1, 2),
        2,
        "the mean over ranks is taken, and each rank divides its own loss by 2 once too often",
    ),
    "multiplied in the loss": (
        training(lambda model: (loss * 2 for loss in of_sums(1, 2)(model))),
        reference(1, 2),
        2,
        "the mean over ranks is taken, and the gradients of each rank are 2 times too large",
    ),
    "summed": (
        training(of_sums(1, 2), in_total),
        reference(1, 2),
        2,
        "gradients are summed, not averaged, over ranks",
    ),
}


@pytest.mark.parametrize(("train", "plainly", "world_size"), RIGHT.values(), ids=RIGHT)
def test_passes_with_the_right_weights_pass(world, train, plainly, world_size):
    check_same_trajectory(train, plainly, net, world, world_size=world_size, steps=2)


@pytest.mark.parametrize(("train", "plainly", "world_size", "told"), WRONG.values(), ids=WRONG)
def test_the_weights_of_passes_are_the_cause(world, train, plainly, world_size, told):
    with pytest.raises(AssertionError, match=f"likely cause .*{re.escape(told)}"):
        check_same_trajectory(train, plainly, net, world, world_size=world_size, steps=2)


def test_a_gradient_that_is_no_sum_of_passes_has_no_such_cause(world):
    def twisted(model):
        average(model)
        model[2].weight.grad.copy_(model[2].weight.grad.flip(1))

    with pytest.raises(AssertionError, match="no known cause fits"):
        check_same_trajectory(training(of_sums(1, 2), twisted), reference(1, 2), net, world)


@pytest.mark.parametrize("kept", [True, False])
def test_a_layer_that_draws_again_in_the_backward_pass_is_named(world, kept):
    """The broken training recomputes a dropout with other random numbers; the right one restores them."""

    def make():
        return nn.Sequential(
            nn.Linear(3, 8), nn.Sequential(nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8)), nn.Linear(8, 1)
        )

    def train_with(run):
        def train(model, steps):
            torch.manual_seed(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                optimizer.zero_grad()
                model[2](run(model[1], model[0](BATCH[:, :3]))).square().mean().backward()
                optimizer.step()

        return train

    def recomputed(block, inputs):
        return checkpoint(block, inputs, use_reentrant=False, preserve_rng_state=kept)

    plain = train_with(lambda block, inputs: block(inputs))
    if kept:
        check_same_trajectory(train_with(recomputed), plain, make, world, world_size=1, steps=2)
        return
    with pytest.raises(AssertionError, match=r"runs layer '1.1' again with other random numbers than the forward pass"):
        check_same_trajectory(train_with(recomputed), plain, make, world, world_size=1, steps=2)


def test_a_training_that_fails_when_it_runs_again_keeps_its_message(world, tmp_path):
    def train(model, steps):
        (tmp_path / f"{dist.get_rank()}").touch(exist_ok=False)
        training(of_means(1))(model, steps)

    with pytest.raises(AssertionError, match="samples weigh otherwise"):
        check_same_trajectory(train, reference(1, 2), net, world)
