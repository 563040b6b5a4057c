"""A pass fails in a later step on one rank only: its own error is the verdict, and no rank waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from .models import MSE, SGD, samples, side_by_side, starter, tanh_net

pytestmark = pytest.mark.verifies("Pipeline")


class Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("bad gradient")


class Fragile(nn.Linear):
    """A layer that fails as ``how`` states, in the micro-batch with large inputs."""

    def __init__(self, how):
        super().__init__(3, 3)
        self.how = how

    def forward(self, x):
        y = super().forward(x)
        if x.abs().max() < 100:
            return y
        if self.how == "forward":
            raise ValueError("bad activation")
        return y.repeat(2, 1) if self.how == "shape" else Refused.apply(y)


def fragile_loss(out, targets):
    if targets.max() > 100:
        raise ValueError("bad target")
    return MSE(out, targets)


def vector_loss(out, targets):
    value = (out - targets).pow(2)
    return value.mean(1) if targets.max() > 100 else value.mean()


def batch(spoilt, n_microbatches):
    """Return a batch in which the samples of the second to last micro-batch are large."""
    x, y = samples(2 * n_microbatches)
    if spoilt == "inputs":
        x[-4:-2] *= 1e4
    elif spoilt == "targets":
        y[-4:-2] += 1e4
    return x, y


SCHEDULES = {"gpipe": {}, "1f1b": {}, "interleaved": {}, "pipedream": {"optimizer": SGD}}
KINDS = {
    "forward": (0, "inputs", "bad activation", "forward pass of micro-batch 2 through stage 0"),
    "middle": (1, "inputs", "bad activation", "forward pass of micro-batch 2 through stage 1"),
    "backward": (0, "inputs", "bad gradient", "backward pass of micro-batch 2 through stage 0"),
    "shape": (0, "inputs", r"stage 0 returned float32 \(4, 3\) for micro-batch 2", "forward pass of micro-batch 2"),
    "loss": (None, "targets", "bad target", "forward pass of micro-batch 2 through stage"),
    "vector": (None, "targets", r"got a tensor of shape \(2,\) from loss", "forward pass of micro-batch 2 through"),
}


def model_of(kind, stages):
    """Return one linear layer for each stage; no layer between them makes large activations small."""
    place, *_ = KINDS[kind]
    how = "forward" if kind == "middle" else kind
    return nn.Sequential(*(Fragile(how) if stage == place else nn.Linear(3, 3) for stage in range(stages)))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_one_rank_ends_all_and_says_where(subject, world, schedule, kind):
    stages = 4 if schedule == "interleaved" else 2
    _, spoilt, message, where = KINDS[kind]
    loss = {"loss": fragile_loss, "vector": vector_loss}.get(kind, MSE)

    def train():
        torch.manual_seed(0)
        pipeline = subject(
            model_of(kind, stages), loss, schedule=schedule, n_microbatches=4, split="layers", **SCHEDULES[schedule]
        )
        for number in range(4):
            pipeline.step(*batch(spoilt if number == 2 else None, 4))

    with pytest.raises(ValueError, match=message) as caught:
        world.run(train, world_size=2)
    assert where in "\n".join(caught.value.__notes__)
    # the ranks still work
    assert world.run(starter_of(subject, schedule, stages), world_size=2) == [True, True]


def starter_of(subject, schedule, stages):
    def train():
        start = starter(subject, MSE, schedule=schedule, n_microbatches=4, **SCHEDULES[schedule])
        module, step = start(tanh_net(stages))
        step(*samples(8))
        return schedule == "pipedream" or all(p.grad is not None for p in module.parameters())

    return train


@pytest.mark.beyond_contract("error messages")
def test_another_shape_in_the_pass_before_the_ranks_agree_is_told_before_it_is_sent(subject, world):
    """A step with another number of samples begins with a header, and does its first pass before that has arrived."""

    def train():
        torch.manual_seed(0)
        pipeline = subject(model_of("shape", 2), MSE, schedule="gpipe", n_microbatches=2, split="layers")
        for count, factor in ((8, 1), (6, 1), (8, 1e4)):
            x, y = samples(count)
            pipeline.step(x * factor, y)

    with pytest.raises(ValueError, match=r"stage 0 returned float32 \(8, 3\) for micro-batch 0, and float32 \(4, 3\)"):
        world.run(train, world_size=2)


@pytest.mark.beyond_contract("error messages")
def test_an_error_in_one_of_two_pipelines_ends_both(subject, world):
    def train():
        rank = dist.get_rank()
        pipeline = subject(model_of("forward", 2), MSE, n_microbatches=4, split="layers", **side_by_side(rank))
        for number in range(3):
            pipeline.step(*batch("inputs" if number == 2 and rank == 2 else None, 4))

    with pytest.raises(ValueError, match="bad activation") as caught:
        world.run(train, world_size=4)
    assert "forward pass of micro-batch 2 through stage 0" in "\n".join(caught.value.__notes__)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("kind", KINDS)
def test_devices_of_one_process_go_on_after_it(subject, kind):
    """The failed step's activations are dropped."""
    _, spoilt, message, _ = KINDS[kind]
    loss = {"loss": fragile_loss, "vector": vector_loss}.get(kind, MSE)

    def made():
        torch.manual_seed(0)
        return subject(model_of(kind, 3), loss, n_microbatches=4, split="layers", devices=["cpu"] * 3)

    pipeline, fresh = made(), made()
    for one in (pipeline, fresh):
        one.step(*batch(None, 4))
    with pytest.raises(ValueError, match=message):
        pipeline.step(*batch(spoilt, 4))
    assert not any(stage.live or stage.outputs for stage in pipeline._built.stages.values())
    for one in (pipeline, fresh):
        one.module.zero_grad()
        one.step(*batch(None, 4))
    for mine, goal in zip(pipeline.module.parameters(), fresh.module.parameters(), strict=True):
        assert torch.equal(mine.grad, goal.grad)
