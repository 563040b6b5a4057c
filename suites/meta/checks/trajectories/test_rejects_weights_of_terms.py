"""check_same_trajectory tells how ranks weigh in one term of a loss."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_same_trajectory
from pdlcheck.errors import CheckFailed

SIZES = [5, 3]  # of the shares
BATCH = torch.randn(sum(SIZES), 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(3, 4), nn.ModuleList(nn.Linear(4, 5) for _ in range(2))

    def losses(self, samples):
        """Return the summed loss of each head."""
        hidden = torch.tanh(self.body(samples[:, :3]))
        return [(head(hidden) - samples[:, 3:]).square().sum() for head in self.heads]


def training(share, change=lambda model: None):
    """Return a training; ``share(losses, samples)`` returns the loss of a rank, whose gradients are averaged."""

    def train(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            own = BATCH.split(SIZES)[dist.get_rank()]
            optimizer.zero_grad()
            share(model.losses(own), len(own)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            change(model)
            optimizer.step()

    return train


def plainly(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (sum(model.losses(BATCH)) / len(BATCH)).backward()
        optimizer.step()


def by_all(losses, own):
    return sum(losses) * dist.get_world_size() / sum(SIZES)


def second_by_own(losses, own):
    return losses[0] * dist.get_world_size() / sum(SIZES) + losses[1] / own


def both_by_own(losses, own):
    return sum(losses) / own


def twist(model):
    for parameter in model.heads[1].parameters():
        parameter.grad *= parameter.grad.abs()


def test_a_loss_whose_terms_weigh_alike_passes(world):
    check_same_trajectory(training(by_all), plainly, TwoHeads, world)


@pytest.mark.parametrize(
    ("train", "begins"),
    [
        (
            training(second_by_own),
            "in parameter 'heads.1.weight' and 1 more, ranks have wrong weights: each counts 0.5 times",
        ),
        (training(both_by_own), "ranks have wrong weights: each counts 0.5 times in the gradient, but"),
        (training(by_all, twist), "None"),
    ],
)
def test_ranks_that_weigh_otherwise_in_one_term_are_told(world, train, begins):
    with pytest.raises(CheckFailed) as raised:
        check_same_trajectory(train, plainly, TwoHeads, world)
    assert str(raised.value.cause).startswith(begins)
