"""One training by several means: a small model in float64, a batch of two rows for each rank, three steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .entry import WORLD_SIZE, everywhere

STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * WORLD_SIZE, 4, generator=generator, dtype=torch.float64)


def shard(step: int) -> torch.Tensor:
    return batch(step).chunk(WORLD_SIZE)[dist.get_rank()]


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def train(model, optimizer, data=shard):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()


def plain(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def full(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def trained_in_one_process(make_optimizer=make_sgd) -> list[torch.Tensor]:
    model = make_model()
    train(model, make_optimizer(model.parameters()), batch)
    return plain(model)


def trained_alone():
    return everywhere(trained_in_one_process())


def trained_alone_with_adam():
    return everywhere(trained_in_one_process(make_adam))


def mesh(*shape: int):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
