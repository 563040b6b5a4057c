"""A script with Hugging Face Accelerate: pytest examples/training/test_accelerate.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.checks import check_training

accelerate = pytest.importorskip("accelerate", reason="the example needs accelerate: pip install accelerate")
torch.manual_seed(0)
BATCHES = [(torch.randn(12, 4), torch.randn(12, 1)) for _ in range(3)]


def make():
    accelerate.utils.set_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def wrap(model):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model.accelerator = accelerator
    return model, optimizer


def step(model, optimizer, batch):
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    model.accelerator.backward(loss)
    model.accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def save(path, model, optimizer):
    model.accelerator.save_state(path)


def load(path, model, optimizer):
    model.accelerator.load_state(path)


def loader(dataset, epochs):
    batches = accelerate.Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    return [list(batches) for _ in range(epochs)]


@torch.no_grad()
def evaluate(model, inputs, targets):
    accelerator = accelerate.Accelerator(cpu=True)
    model, batches = accelerator.prepare(model, DataLoader(list(zip(inputs, targets, strict=True)), batch_size=4))
    errors = [accelerator.gather_for_metrics((model(x) - y).square()) for x, y in batches]
    return float(torch.cat(errors).mean())


PARTS = {
    "batches": BATCHES,
    "wrap": wrap,
    "step": step,
    "loader": loader,
    "loader_options": {"dealt_in": 4},
    "save": save,
    "load": load,
}


def test_training(world):
    print(check_training(make, world, **PARTS, evaluate=evaluate, samples=(torch.randn(25, 4), torch.randn(25, 1))))


def test_an_evaluation_with_repeated_samples_is_found(world):
    def repeats(model, inputs, targets):
        accelerator = accelerate.Accelerator(cpu=True)
        model, batches = accelerator.prepare(model, DataLoader(list(zip(inputs, targets, strict=True)), batch_size=4))
        errors = [accelerator.gather((model(x) - y).square()) for x, y in batches]
        return float(torch.cat(errors).mean())

    with pytest.raises(AssertionError, match=r"check_metric +wrong"):
        check_training(make, world, evaluate=repeats, samples=(torch.randn(25, 4), torch.randn(25, 1)))
