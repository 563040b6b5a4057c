"""The trainings that several suites of local SGD share."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.primitives import sync_gradients

PLAIN = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.05)
few = settings(max_examples=6)
POLICIES = st.fixed_dictionaries(
    {"momentum": st.sampled_from(["keep", "average", "reset"]), "buffers": st.sampled_from(["keep", "broadcast"])}
)


class Stepper:
    """An object with a method ``step``."""

    def __init__(self, step):
        self.step = step


OUTERS = [(1.0, 0.0, False), (0.7, 0.9, True), (0.5, 0.5, False)]


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def backward(model, step):
    """Compute gradients for samples that differ from rank to rank and from step to step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()


def synchronous(optimizer, model):
    def step():
        sync_gradients(model)
        optimizer.step()

    return Stepper(step)


def sgd(outer):
    lr, momentum, nesterov = outer
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
