"""The training that the checkpoint suites stop and start again."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR

from pdlcheck.primitives import broadcast_parameters, load_checkpoint, save_checkpoint, shard_indices, sync_gradients

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.1, amsgrad=True)
SCHEDULERS = {
    "milestones": partial(MultiStepLR, milestones=[2, 4]),
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 0.7**step),
    "one cycle": partial(OneCycleLR, max_lr=0.2, total_steps=10),
}


class Shards:
    """A sampler of this rank's part of every batch, in the order of the epoch; its position counts over all ranks."""

    def __init__(self, num_samples=12, batch=8):
        self.num_samples, self.batch, self.epoch, self.position = num_samples, batch, 0, 0

    def next(self):
        order = shard_indices(self.num_samples, rank=0, world_size=1, epoch=self.epoch)
        indices = order[self.position : self.position + self.batch]
        self.position += self.batch
        if self.position >= self.num_samples:
            self.epoch, self.position = self.epoch + 1, 0
        return indices[dist.get_rank() :: dist.get_world_size()]

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.num_samples}

    def load_state_dict(self, state):
        if state["num_samples"] != self.num_samples:
            raise ValueError(f"{state['num_samples']} samples were saved, these are {self.num_samples}")
        self.epoch, self.position = state["epoch"], state["position"]


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))


def parts(make=net, optimizer=SGD, scheduler="milestones", alike=True):
    model = make()
    if alike and dist.is_initialized():
        broadcast_parameters(model)
    optimizer = optimizer(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": SCHEDULERS[scheduler](optimizer),
        "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        "sampler": Shards(),
        "augment": torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0),
    }


def step(model, optimizer, scheduler, scaler, sampler, augment):
    """Take one training step that uses every object with a state."""
    indices = sampler.next()
    x = torch.linspace(-1, 1, 36).view(12, 3)[indices] + 0.01 * torch.rand(len(indices), 3, generator=augment)
    x = x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())
    optimizer.zero_grad()
    if len(x) > 1:  # batch norm needs two samples
        scaler.scale(model(x).square().mean()).backward()
    sync_gradients(model, weight=len(x) if len(x) > 1 else 0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()


def training(save=save_checkpoint, load=load_checkpoint, **made):
    """Return a start function for the checks."""

    def start():
        held = parts(**made)
        taken = [0]

        def train(i):
            step(**held)
            taken[0] = i + 1

        return (
            held["model"],
            train,
            lambda path: save(path, taken[0], **held),
            lambda path: load(newest(path), **held),
        )

    return start


def newest(path):
    """Return the last file, intact or not."""
    return sorted(path.glob("*.ckpt"))[-1]


def weights(held):
    return [tensor.tolist() for tensor in held["model"].state_dict().values()]


def written(folder, world, world_size=2, step_number=2, **made):
    """Return a checkpoint that ``world_size`` ranks wrote after two steps."""

    def write():
        torch.manual_seed(dist.get_rank())
        held = parts(**made)
        for _ in range(2):
            step(**held)
        return save_checkpoint(folder, step_number, **held)

    return world.run(write, world_size=world_size)[0]


def damage(path, byte=-10):
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


class Holder:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def cut(path):
    path.write_bytes(path.read_bytes()[:200])
