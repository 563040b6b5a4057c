"""A script with Lightning's Trainer: pytest examples/training/test_lightning_trainer.py."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pdlcheck.checks import check_training

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning = pytest.importorskip("lightning", reason="the example needs Lightning: pip install lightning")
torch.manual_seed(0)
DATA = TensorDataset(torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64))


class Regression(lightning.LightningModule):
    def __init__(self, model, scale=1.0):
        super().__init__()
        self.model, self.scale = model, scale

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets) * self.scale

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def train(model, steps, scale=1.0):
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=dist.get_world_size(),
        max_steps=steps,
        use_distributed_sampler=False,  # its own one shuffles
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sampler = DistributedSampler(DATA, dist.get_world_size(), dist.get_rank(), shuffle=False)
    loader = DataLoader(DATA, batch_size=12 // dist.get_world_size(), sampler=sampler)
    trainer.fit(Regression(model, scale), loader)


def plainly(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in list(DataLoader(DATA, batch_size=12))[:steps]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def test_training(world):
    print(check_training(make, world, train=train, reference=plainly))


def test_a_loss_that_is_multiplied_by_the_number_of_ranks_is_found(world):
    def scaled(model, steps):
        train(model, steps, scale=dist.get_world_size())

    with pytest.raises(AssertionError, match="the gradients of each rank are 2 times too large"):
        check_training(make, world, train=scaled, reference=plainly)
