"""Pipelines written by hand, so that tests can break each part."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn

MSE = nn.MSELoss()
M = 3


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(size, 2, generator=generator) for _ in range(2)) for size in sizes]


EVEN, UNEVEN = batches(6, 9), batches(7, 5)


class ByHand:
    """GPipe on two ranks in plain sends and receives; ``spoilt`` breaks parts of it."""

    def __init__(self, model, **spoilt):
        self.rank = dist.get_rank()
        names = ["0", "1"] if self.rank == 0 else ["2"]
        self.module = nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in names))
        self.spoilt = spoilt
        self.kept = None

    def part(self, tensor, i):
        return tensor.tensor_split(M)[0 if self.spoilt.get("same_slice") else i]

    def count(self):
        return M - 1 if self.spoilt.get("last_dropped") else M

    def step(self, x, y):
        return self.first(x) if self.rank == 0 else self.second(x, y)

    def first(self, x):
        outs = []
        for i in range(self.count()):
            out = self.module(self.part(x, i))
            if self.spoilt.get("stale") and self.kept is not None and self.kept[i].shape == out.shape:
                dist.send(self.kept[i], 1)
            else:
                dist.send(out.detach(), 1)
            outs.append(out)
        self.kept = [out.detach() for out in outs]
        for out in self.swapped("gradients", outs):
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        self.tie()

    def second(self, x, y):
        inputs, outs, losses = [], [], []
        for i in range(self.count()):
            targets = self.part(y, i)
            received = torch.empty(len(targets), self.module[0].in_features, dtype=x.dtype)
            dist.recv(received, 0)
            inputs.append(received.requires_grad_())
        for i, received in enumerate(self.swapped("activations", inputs)):
            targets = self.part(y, i)
            outs.append(self.module(received))
            losses.append(MSE(outs[-1], targets) * self.share(len(targets), len(y)))
        if self.spoilt.get("by_slot"):
            inputs = self.swapped("activations", inputs)
        for loss in losses:
            if self.spoilt.get("zeroed"):
                self.module.zero_grad()
            loss.backward()
        for received in inputs:
            dist.send(received.grad * self.spoilt.get("sent_back", 1), 0)
        for parameter in self.module.parameters():
            parameter.grad *= self.spoilt.get("kept", 1)
        self.tie()
        order = self.spoilt.get("order", range(self.count()))
        loss = torch.stack(losses).sum() * self.spoilt.get("loss_scale", 1)
        if self.spoilt.get("last_loss"):
            loss = MSE(outs[-1], targets)
        return loss.detach(), torch.cat([outs[i] for i in order]).detach()

    def swapped(self, what, tensors):
        """Return the tensors, with the first two exchanged if ``what`` is the part to break."""
        return [tensors[1], tensors[0], *tensors[2:]] if self.spoilt.get("swapped") == what else tensors

    def share(self, own, total):
        return self.spoilt.get("scale", lambda own, total: own / total)(own, total)

    def tie(self):
        weights = [p for name, p in self.module.named_parameters() if name in ("0.weight", "2.weight")]
        if weights[0].shape == (2, 2) and not self.spoilt.get("not_summed"):
            dist.all_reduce(weights[0].grad)
            if self.spoilt.get("rounded") and self.rank:
                weights[0].grad *= 1 + 1e-13


def starter(kind=ByHand, **spoilt):
    def pipeline(model):
        made = kind(model, **spoilt)
        return made.module, made.step

    return pipeline
