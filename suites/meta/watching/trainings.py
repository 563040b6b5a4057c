"""Trainings that are watched, with a place for a fault."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pdlcheck


def net():
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3), nn.Tanh()
    return nn.Sequential(*layers)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ddp(model):
    return DistributedDataParallel(model)


def on_rank(
    fault=None,
    *,
    at=3,
    steps=5,
    wrap=ddp,
    make=net,
    optimizer=adam,
    before=None,
    start=None,
    after=None,
    ids=None,
    same_data=False,
    **options,
):
    """Train, and return the report: the error, and its text.

    Args:
        fault: called with the model and the optimizer between backward pass and step, at step ``at``.
        at: the step of the fault.
        steps: the number of steps.
        wrap: returns what the ranks train.
        make: returns the model.
        optimizer: returns the optimizer.
        before: called with the model before it is wrapped.
        start: called with the model and the optimizer before the first step.
        after: called with the optimizer after each step.
        ids: returns the ids of the samples of a step.
        same_data: whether all ranks have the same samples.
        options: those of watch.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = make()
    if before is not None:
        before(model)
    model = wrap(model)
    updates = optimizer(model)
    options = {"every": 2, **options}
    with pdlcheck.watch(model, updates, **options) as watcher:
        if start is not None:
            start(model, updates)
        torch.manual_seed(rank)
        generator = torch.Generator().manual_seed(0 if same_data else rank)
        for step in range(1, steps + 1):
            updates.zero_grad()
            if ids is not None:
                watcher.saw(ids(step))
            model(torch.randn(5, 4, generator=generator)).square().mean().backward()
            if fault is not None and step == at:
                fault(model, updates)
            updates.step()
            if after is not None:
                after(updates)
    return watcher.violation


# models that ranks divide


def linears():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())


def fsdp2(model):
    return fully_shard(model)


def hsdp(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_and_data_parallel(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
