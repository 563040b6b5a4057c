"""The memory of a pipeline: recomputed activations, live activations of a schedule."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_same_gradients

from .models import MSE, SGD, dropout_net, samples, starter

pytestmark = pytest.mark.verifies("Pipeline")


# recomputation


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_recomputed_dropout_is_the_dropout_of_the_forward_pass(subject, world, schedule):
    plain = starter(subject, MSE, schedule=schedule, n_microbatches=3)
    recomputing = starter(subject, MSE, schedule=schedule, n_microbatches=3, recompute=True)
    check_same_gradients(recomputing, plain, dropout_net, [samples(9), samples(7)], world, world_size=2)


class DoublesLargeNumbers(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2) if x.any() else x)


@pytest.mark.beyond_contract("error messages")
def test_what_writes_its_input_unseen_is_not_recomputed(subject):
    model = nn.Sequential(DoublesLargeNumbers(3, 3), nn.Linear(3, 3))
    pipeline = subject(model, MSE, n_microbatches=2, devices=["cpu", "cpu"], recompute=True)
    with pytest.raises(RuntimeError, match="Pipeline cannot recompute stage 0: its layers wrote their input in place"):
        pipeline.step(*samples(4))


@pytest.mark.if_subject_takes("devices", "recompute")
def test_recomputation_keeps_inputs_instead_of_activations(subject):
    kept = []

    class Watched(nn.Module):
        def forward(self, x):
            y = x * 2
            kept.append(weakref.ref(y))
            return y.tanh() * y

    def alive(recompute):
        kept.clear()
        model = nn.Sequential(nn.Linear(3, 3), Watched(), nn.Linear(3, 3))
        pipeline = subject(model, MSE, devices=["cpu"], schedule="gpipe", n_microbatches=4, recompute=recompute)
        at_the_loss = []
        pipeline._built.stages[0].loss = lambda out, y: (
            at_the_loss.append(sum(r() is not None for r in kept)),
            MSE(out, y),
        )[1]
        pipeline.step(*samples(4))
        return max(at_the_loss)

    assert alive(recompute=False) >= 4
    assert alive(recompute=True) <= 1


# live activations


class Counter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append(1)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.events.append(-1)
        return grad, None


class Counting(nn.Module):
    """A layer that counts forward passes that wait for their backward pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.events = []

    def forward(self, x):
        return Counter.apply(x * self.weight, self.events)


@pytest.mark.parametrize("n_microbatches", [2, 6])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
def test_live_activations_are_those_of_the_schedule(subject, world, schedule, n_microbatches):
    n_stages = 3

    def peak():
        layers = [Counting() for _ in range(n_stages)]
        keywords = {"optimizer": SGD} if schedule == "pipedream" else {}
        pipeline = subject(nn.Sequential(*layers), MSE, schedule=schedule, n_microbatches=n_microbatches, **keywords)
        own = layers[dist.get_rank()].events
        pipeline.step(*samples(6))
        own.clear()
        pipeline.step(*samples(6))
        return max(sum(own[:end]) for end in range(len(own) + 1))

    for rank, found in enumerate(world.run(peak, world_size=n_stages)):
        assert found == (n_microbatches if schedule == "gpipe" else min(n_stages - rank, n_microbatches))
