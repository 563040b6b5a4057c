"""A script with DistributedDataParallel, checked part by part: pytest examples/training/test_ddp.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from pdlcheck.checks import check_training

torch.manual_seed(0)
BATCHES = [(torch.randn(12, 4), torch.randint(0, 3, (12,))) for _ in range(4)]
SAMPLES = torch.randn(50, 4), torch.randint(0, 3, (50,))


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def loss(model, batch):
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def save(path, model, optimizer):
    path.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "state.pt")
    torch.save(torch.get_rng_state(), path / f"random_{dist.get_rank()}.pt")
    dist.barrier()


def load(path, model, optimizer):
    state = torch.load(path / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(torch.load(path / f"random_{dist.get_rank()}.pt"))


def loader(dataset, epochs):
    sampler = DistributedSampler(dataset)
    batches = DataLoader(dataset, batch_size=4, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield list(batches)


@torch.no_grad()
def evaluate(model, inputs, labels):
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = (model(inputs[mine]).argmax(1) == labels[mine]).sum()
    counts = torch.tensor([right, len(labels[mine])])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


PARTS = {"batches": BATCHES, "loss": loss, "wrap": DistributedDataParallel, "loader": loader}
CHECKPOINTS = {"save": save, "load": load}


def test_training(world):
    report = check_training(make, world, **PARTS, **CHECKPOINTS, evaluate=evaluate, samples=SAMPLES)
    print(report)


def test_a_load_without_the_optimizer_is_found(world):
    def forgets(path, model, optimizer):
        model.load_state_dict(torch.load(path / "state.pt")["model"])
        torch.set_rng_state(torch.load(path / f"random_{dist.get_rank()}.pt"))

    with pytest.raises(AssertionError, match="lost: optimizer"):
        check_training(make, world, **PARTS, save=save, load=forgets)
