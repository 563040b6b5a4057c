"""check_same_trajectory on a loss with parameters of its own, which a wrapper of the network leaves out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_same_trajectory

BATCHES = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Scaled(nn.Module):
    """A loss with a learned scale and offset."""

    def __init__(self):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(2))

    def forward(self, outputs, targets):
        return ((outputs + self.offset - targets) * self.scale).square().mean()


def make():
    return nn.ModuleDict({"net": nn.Linear(3, 2), "loss": Scaled()})


def fit(model, batches, net, sync=lambda loss: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model["loss"](net(batch[:, :3]), batch[:, 3:]).backward()
        sync(model["loss"])
        optimizer.step()


def plainly(model, steps):
    fit(model, BATCHES[:steps], model["net"])


def trained(sync):
    def train(model, steps):
        own = BATCHES[:steps, dist.get_rank() :: dist.get_world_size()]
        fit(model, own, DistributedDataParallel(model["net"]), sync)

    return train


def averaged(loss, divisor=None):
    for parameter in loss.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor or dist.get_world_size()


def test_the_parameters_of_a_loss_are_compared(world):
    check_same_trajectory(trained(averaged), plainly, make, world)
    with pytest.raises(
        AssertionError, match=r"different gradients of parameter 'loss.scale' and 1 more, which were not"
    ):
        check_same_trajectory(trained(lambda loss: None), plainly, make, world)
    with pytest.raises(AssertionError, match=r"parameter 'loss.scale'[\s\S]*world_size is 2: gradients are summed"):
        check_same_trajectory(trained(lambda loss: averaged(loss, 1)), plainly, make, world)
