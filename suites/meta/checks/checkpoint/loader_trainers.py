"""Trainers that read their data from a DataLoader, and resume within a pass over it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

DATA = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))


class Trainer:
    """A trainer that saves its place in the data, and skips to it after loading; each pass has 4 batches."""

    batch_size, noise, scale = 4, 0.0, 1.0

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.generator = torch.Generator().manual_seed(7)  # of the order, or of the workers
        self.loader = self.make_loader()
        self.epoch, self.place, self.begun, self.batches = 0, 0, None, None

    def make_loader(self):
        self.sampler = DistributedSampler(DATA)
        return DataLoader(DATA, batch_size=self.batch_size, sampler=self.sampler, generator=self.generator)

    def set_epoch(self):
        self.sampler.set_epoch(self.epoch)

    def begin(self):
        self.set_epoch()
        self.begun = self.generator.get_state()
        batches = iter(self.loader)
        for _ in range(self.place):
            next(batches)
        return batches

    def next_batch(self):
        if self.batches is None:
            self.batches = self.begin()
        batch = next(self.batches)
        self.place += 1
        if self.place == len(self.loader):
            self.epoch, self.place, self.batches = self.epoch + 1, 0, None
        return batch

    def step(self, _):
        x = self.next_batch()
        self.optimizer.zero_grad()
        self.model(self.scale * x + self.noise * torch.rand(1)).square().mean().backward()
        self.optimizer.step()

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        within = self.batches is not None
        state |= {"epoch": self.epoch, "place": self.place, "numbers": torch.get_rng_state()}
        torch.save(state | {"generator": self.begun if within else self.generator.get_state()}, f"{path}-{rank()}")

    def load(self, path):
        self.restore(torch.load(f"{path}-{self.rank_to_load()}"))

    def rank_to_load(self):
        return rank()

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.place = state["epoch"], state["place"]
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["numbers"])

    @classmethod
    def start(cls):
        one = cls()
        return one.model, one.step, one.save, one.load


def rank():
    return dist.get_rank()


class SkipsInEpoch0(Trainer):
    """A trainer whose loader for the rest of an epoch is a new one, which does not know the epoch."""

    def set_epoch(self):
        if not self.place:
            super().set_epoch()
