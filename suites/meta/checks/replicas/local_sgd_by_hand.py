"""Local SGD by hand, for its checks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from pdlcheck.checks import check_local_sgd


def mean_of(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


class Trainer:
    """A correct trainer of local SGD by hand; subclasses break parts of it."""

    every = 2
    first = None  # the first local step after which models are averaged; number `every` if None
    synchronous_steps = 0

    def __init__(self, optimizer, model, node_group=None):
        self.optimizer, self.model, self.node_group = optimizer, model, node_group
        self.taken = 0
        self.reference = copy.deepcopy(list(model.parameters()))
        self.velocity = [torch.zeros_like(p) for p in self.reference]

    def step(self):
        self.sync()
        self.optimizer.step()
        self.taken += 1
        if self.is_due():
            self.meet()

    def is_due(self):
        since = self.taken - self.synchronous_steps - (self.first or self.every)
        return since >= 0 and since % self.every == 0

    def sync(self):
        if self.taken < self.synchronous_steps:
            self.sync_in(None)
        elif self.node_group is not None:
            self.sync_in(self.node_group)

    def sync_in(self, group):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                mean_of(parameter.grad, group)

    def meet(self):
        self.average()
        self.share_buffers()

    def average(self):
        for parameter in self.model.parameters():
            mean_of(parameter.detach())

    def share_buffers(self):
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def states(self, *names):
        return [self.optimizer.state[p][name] for p in self.model.parameters() for name in names]


def check_trainer(trainer, world, **rule):
    """Call the check with the treatment of buffers that ``Trainer`` has, unless ``rule`` has another one."""
    check_local_sgd(trainer, world, **{"buffers": "broadcast", **rule})
