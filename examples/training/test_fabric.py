"""A script with Lightning Fabric: pytest examples/training/test_fabric.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_training

fabric_of = pytest.importorskip("lightning.fabric", reason="the example needs Lightning: pip install lightning")
torch.manual_seed(0)
BATCHES = [(torch.randn(12, 4), torch.randn(12, 1)) for _ in range(3)]


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def wrap(model):
    fabric = fabric_of.Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model.fabric = fabric
    return model, optimizer


def step(model, optimizer, batch):
    inputs, targets = batch
    optimizer.zero_grad()
    model.fabric.backward(nn.functional.mse_loss(model(inputs), targets))
    model.fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


def save(path, model, optimizer):
    random = torch.get_rng_state()
    model.fabric.save(path / "state.ckpt", {"model": model, "optimizer": optimizer})
    torch.save(random, path / f"random_{dist.get_rank()}.pt")


def load(path, model, optimizer):
    model.fabric.load(path / "state.ckpt", {"model": model, "optimizer": optimizer})
    torch.set_rng_state(torch.load(path / f"random_{dist.get_rank()}.pt"))


PARTS = {"batches": BATCHES, "wrap": wrap}


def test_training(world):
    print(check_training(make, world, **PARTS, step=step, save=save, load=load))


def test_micro_batches_that_never_synchronise_are_found(world):
    def never(model, optimizer, batch):
        optimizer.zero_grad()
        for inputs, targets in zip(*(part.chunk(2) for part in batch), strict=True):
            with model.fabric.no_backward_sync(model):
                model.fabric.backward(nn.functional.mse_loss(model(inputs), targets) / 2)
        optimizer.step()

    with pytest.raises(AssertionError, match="no rank reduced or gathered values in step 1"):
        check_training(make, world, **PARTS, step=never)
