"""A script with tensor parallel layers (DTensor): pytest examples/training/test_tensor_parallel.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pdlcheck.checks import check_training

torch.manual_seed(0)
BATCHES = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]


def make():
    torch.manual_seed(0)  # all ranks draw alike: the masks of what every rank holds whole must be the same
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 4), nn.Dropout(0.1), nn.Linear(4, 2))


def wrap(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


PARTS = {"batches": BATCHES, "loss": loss, "wrap": wrap, "same_samples": [[0, 1]]}


def test_training(world):
    print(check_training(make, world, **PARTS))


def test_seeds_of_each_rank_are_found(world):
    def make_and_seed():
        model = make()
        torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
        return model

    with pytest.raises(AssertionError, match=r"replicas stay equal +check_replicas_in_sync +wrong"):
        check_training(make_and_seed, world, **PARTS)
