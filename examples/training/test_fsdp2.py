"""A script with fully_shard (FSDP2): pytest examples/training/test_fsdp2.py."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from pdlcheck.checks import check_training

torch.manual_seed(0)
TOKENS = [torch.randint(0, 32, (12, 9)) for _ in range(3)]


def make():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(32, 8), *layers, nn.Linear(8, 32))
    torch.manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return model


def wrap(model):
    for layer in model[1:3]:
        fully_shard(layer)
    return fully_shard(model)


def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def save(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    torch.save(torch.get_rng_state(), path / f"random_{dist.get_rank()}.pt")


def load(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    torch.set_rng_state(torch.load(path / f"random_{dist.get_rank()}.pt"))


def test_training(world):
    print(check_training(make, world, batches=TOKENS, loss=loss, wrap=wrap, save=save, load=load))


def test_a_sum_of_gradients_is_found(world):
    def sums(model):
        wrap(model).set_gradient_divide_factor(1.0)
        return model

    with pytest.raises(AssertionError, match="gradients are summed, not averaged"):
        check_training(make, world, batches=TOKENS, loss=loss, wrap=sums)
