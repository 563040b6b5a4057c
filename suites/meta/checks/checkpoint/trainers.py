"""A training by hand whose checkpoints hold everything, for the checks of resuming; broken twins lose a part."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

STREAMS = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
}


class Position:
    """A sampler with a position that can be saved and loaded."""

    def __init__(self):
        self.at = 0

    def __next__(self):
        self.at += 1
        return self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def everything_of(parts):
    return {name: held.state_dict() for name, held in parts.items()} | {k: get() for k, (get, _) in STREAMS.items()}


def write(path, rank, state):
    path.mkdir(exist_ok=True)
    torch.save(state, path / f"rank{rank}.pt")


def read(path, rank):
    return torch.load(path / f"rank{rank}.pt", weights_only=False)  # safe: this test wrote the file


def put(parts, state, forget=()):
    for name, held in parts.items():
        if name not in forget:
            held.load_state_dict(state[name])
    for name, (_, set_stream) in STREAMS.items():
        if name not in forget:
            set_stream(state[name])


def honest_save(parts, path):
    write(path, dist.get_rank(), everything_of(parts))


def honest_load(parts, path):
    put(parts, read(path, dist.get_rank()))


def trainer(load=honest_load, save=honest_save, *, iterator=False, learns=True, noise=None):
    """Return a training in which every part of the state matters; ``iterator`` hides the position in the data."""

    def start():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.4), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if learns else 0.0, momentum=0.9)
        position = Position()
        parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
            **({} if iterator else {"sampler": position}),
        }
        data = torch.arange(24.0).view(4, 3, 2).sin() + dist.get_rank()
        batches = (data[i % 4] for i in range(100)) if iterator else (data[next(position) % 4] for _ in range(100))

        def step(i):
            x = next(batches) * (1 + random.random()) + float(np.random.rand())
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
            parts["scheduler"].step()
            if noise:
                noise(model)

        return model, step, lambda path: save(parts, path), lambda path: load(parts, path)

    return start
