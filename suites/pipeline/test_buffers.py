"""Buffers hold the result of a step's passes; passes on zeros, recomputation and undone passes leave no trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from .models import MSE, rank_of, samples, tanh_net

pytestmark = pytest.mark.verifies("Pipeline")

recomputed = pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])


class Aggregating(nn.Module):
    """A layer of a graph network, whose buffer is the graph."""

    def __init__(self, graph):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("graph", graph)

    def forward(self, x):
        return self.linear(x) @ self.graph.to_dense()


class Centred(nn.Linear):
    """A layer whose running mean starts with its first samples."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mean", None)

    def forward(self, x):
        y = super().forward(x)
        new = y.detach().mean(0)
        self.mean = new if self.mean is None else torch.lerp(self.mean, new, 0.5)
        return y - self.mean


class Centring(nn.Module):
    """A loss with a running mean, as in self-distillation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, out, targets):
        self.centre.lerp_(targets.mean(0), 0.5)
        return MSE(out, targets - self.centre)


class Late(nn.Linear):
    """A layer that writes a buffer once it is switched on, as an observer of quantization does."""

    def __init__(self, counting=False):
        super().__init__(3, 3)
        self.counting = counting
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.counting:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_buffer_may_be_sparse(subject, world, layout):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(Aggregating(torch.eye(3).to_sparse(layout=layout)), nn.Linear(3, 3))

    def train():
        pipeline = subject(model(), MSE, schedule="gpipe", n_microbatches=2, split="layers")
        rank, last = rank_of()
        for count in (8, 8, 6, 8):
            x, y = samples(count)
            pipeline.step(x if rank == 0 else None, y if rank == last else None)
        return [p.grad for p in pipeline.module.parameters()]

    whole = model()
    for count in (8, 8, 6, 8):
        x, y = samples(count)
        MSE(whole(x), y).backward()
    found = [grad for rank in world.run(train, world_size=2) for grad in rank]
    for parameter, grad in zip(whole.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.if_subject_takes("recompute")
@recomputed
def test_a_buffer_may_be_none_until_the_first_samples(subject, world, recompute):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(Centred(), nn.Linear(3, 3))

    def train():
        pipeline = subject(model(), MSE, schedule="gpipe", n_microbatches=2, split="layers", recompute=recompute)
        for seed in range(3):
            pipeline.step(*samples(8, seed=seed))
        return dict(pipeline.module.named_buffers()), [p.grad for p in pipeline.module.parameters()]

    whole = model()
    for seed in range(3):
        for x, y in zip(*(part.chunk(2) for part in samples(8, seed=seed)), strict=True):
            (MSE(whole(x), y) / 2).backward()
    (buffers, grads), (_, more) = world.run(train, world_size=2)
    torch.testing.assert_close(buffers["0.mean"], whole[0].mean)
    for parameter, grad in zip(whole.parameters(), [*grads, *more], strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.beyond_contract("error messages")
@recomputed
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_those_of_the_loss_too(subject, world, schedule, recompute):
    counts = [8, 8, 6, 8]

    def train():
        torch.manual_seed(0)
        loss, (rank, _) = Centring(), rank_of()
        pipeline = subject(tanh_net(), loss, schedule=schedule, n_microbatches=2, reduction="mean", recompute=recompute)
        for number, count in enumerate(counts):
            x, y = samples(count, seed=number)
            if number == 1:  # only the first rank finds the error
                with pytest.raises(ValueError, match="needs inputs"):
                    pipeline.step(None if rank == 0 else x, y)
            pipeline.step(x, y)
        return loss.centre, [p.grad for p in pipeline.module.parameters()]

    torch.manual_seed(0)
    whole, loss = tanh_net(), Centring()
    for number, count in enumerate(counts):
        for x, y in zip(*(part.chunk(2) for part in samples(count, seed=number)), strict=True):
            (loss(whole(x), y) / 2).backward()
    (_, grads), (centre, more) = world.run(train, world_size=2)
    torch.testing.assert_close(centre, loss.centre)
    for parameter, grad in zip(whole.parameters(), [*grads, *more], strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def frozen_statistics():
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 3)), norm.eval(), lambda: norm.train()


def sleeping_observer():
    layer = Late()
    return nn.Sequential(layer, nn.Linear(3, 3), nn.Linear(3, 3)), layer, lambda: setattr(layer, "counting", True)


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("make", [frozen_statistics, sleeping_observer])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_those_that_passes_write_from_a_later_step_on_are_as_before_a_step_that_is_refused(
    subject, world, schedule, make
):
    """One layer is switched on between two equal steps; then the last rank refuses a step."""

    def train():
        torch.manual_seed(0)
        model, layer, begin = make()
        pipeline = subject(model, MSE, schedule=schedule, n_microbatches=4, split=[2])
        rank, last = rank_of()
        x, y = samples(8)
        for number in range(5):
            if number == 3:
                begin()
            pipeline.step(x, y)
        before = [buffer.clone() for buffer in layer.buffers()]
        with pytest.raises(ValueError, match="a target for every input"):
            pipeline.step(x, y[:5] if rank == last else y)
        return [torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True)], float(before[-1])

    (kept, calls), _ = world.run(train, world_size=2)
    assert all(kept)
    assert calls == 8


def test_a_layer_that_learns_again_may_write_its_input_then(subject, world):
    """Only this layer changes, in the middle of the training: whether a stage copies its inputs is determined again."""

    def train():
        torch.manual_seed(0)
        dropout = nn.Dropout(0.5, inplace=True).eval()
        model = nn.Sequential(nn.Linear(3, 3), dropout, nn.Linear(3, 3))
        pipeline = subject(model, MSE, schedule="gpipe", n_microbatches=2, split=[1])
        for number in range(4):
            dropout.train(number >= 2)
            pipeline.step(*samples(8))
        return True

    assert all(world.run(train, world_size=2))
