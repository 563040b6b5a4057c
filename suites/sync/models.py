"""Models that the suites of synchronisation share, and models of one rank that cannot be sent."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

few = settings(max_examples=10)


def tanh_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


class Usual(nn.Module):
    """A model with every kind of state: tied weights, mixed dtypes, buffers of all sorts, channels last, gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight
        self.half = nn.Linear(2, 2).half()
        self.conv = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.every_second = nn.Parameter(torch.ones(4, 6)[:, ::2])
        self.register_buffer("last_bits", torch.ones(6, dtype=torch.bfloat16)[::3])
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("rope", torch.ones(2, 2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.ones(0))
        self.register_buffer("empty_of_numpy", torch.from_numpy(np.ones(0)))  # it has stride 0


class Everything(Usual):
    """The same model with a dtype that torch's collectives refuse on gloo."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("short", torch.ones(3, dtype=torch.int16))


def sharded(mesh):
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
    return model


def on_meta(mesh):
    return nn.Linear(2, 2, device="meta")


UNFIT = {
    "sharded": (sharded, "needs tensors that each rank holds whole, '.*' is a DTensor; torch's .*"),
    "device": (on_meta, "got '.*' on device meta, the group's backend .*"),
}
