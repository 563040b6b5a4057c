"""Bugs of gradient clipping, and of other parts of a step that one precision leaves out."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_clip_grad_norm, check_same_trajectory

from .entry import entry


def scale(parameters, norm, max_norm):
    clip_coef = max_norm / (norm + 1e-6)
    for parameter in parameters:
        parameter.grad *= clip_coef.clamp(max=1.0)


@entry(
    "clip-local-norm",
    "SpecForge PR #663, pytorch #72548",
    check="check_clip_grad_norm",
    cause=r"the norm of this rank alone was used",
)
def clips_each_shard_by_its_own_norm(broken, world):
    """Clip the shard of each rank by the norm of this shard."""

    def clip_grad_norm_(parameters, max_norm):
        total = sum((parameter.grad.double() ** 2).sum() for parameter in parameters)
        if not broken:
            dist.all_reduce(total)
        norm = total.sqrt()
        scale(parameters, norm, max_norm)
        return norm

    gradients = [[torch.tensor([3.0, 4.0])], [torch.tensor([6.0, -2.0]), torch.tensor([[1.0]])]]
    check_clip_grad_norm(clip_grad_norm_, world, gradients=gradients, max_norm=1.0)


BATCHES = 3 * torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(11), dtype=torch.float64)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def own_share(batch):
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def error(model, samples):
    return functional.mse_loss(model(samples[:, :3]), samples[:, 3:])


def plainly(model, steps, max_norm=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in BATCHES[:steps]:
        optimizer.zero_grad()
        error(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


@entry(
    "clip-before-sync",
    "BLOOM chronicles 2022-03-24",
    check="check_same_trajectory",
    cause="the gradients of each rank have the norm 1 before they are averaged: each rank clips its own ones",
)
def clips_before_the_all_reduce(broken, world):
    """Clip the gradients of each rank, and then average them over ranks."""

    def train(model, steps, max_norm=1.0):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in BATCHES[:steps]:
            optimizer.zero_grad()
            error(model, own_share(batch)).backward()
            if broken:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            if not broken:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()

    check_same_trajectory(train, plainly, net, world)


@entry(
    "bloom-clip-one-rank",
    "DeepSpeed PR #1801",
    check="check_clip_grad_norm",
    cause=r"the gradients were not clipped on this rank",
)
def clips_on_one_tensor_parallel_rank(broken, world):
    """Scale gradients by the norm of all ranks, but on tensor parallel rank 0 only."""

    def clip_grad_norm_(parameters, max_norm):
        weight, layer_norm = parameters  # the weight is a shard, the LayerNorm is replicated
        mp_rank = dist.get_rank()
        total = (weight.grad.double() ** 2).sum()
        if mp_rank == 0:
            total += (layer_norm.grad.double() ** 2).sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        if mp_rank == 0 or not broken:
            scale(parameters, norm, max_norm)
        return norm

    layer_norm = torch.tensor([1.0, -2.0])
    gradients = [[torch.tensor([3.0, 4.0]), layer_norm], [torch.tensor([6.0, -2.0]), layer_norm.clone()]]
    counted = [[True, True], [True, False]]
    check_clip_grad_norm(clip_grad_norm_, world, gradients=gradients, max_norm=1.0, counted=counted)


@entry(
    "clip-disabled",
    "DeepSpeed PR #3790",
    check="check_same_trajectory",
    cause="that of plainly 1: plainly clips to its norm, and this training does not clip",
)
def clips_in_fp16_only(broken, world):
    """Clip in the step of the fp16 mode, and not in the step of the bf16 mode."""

    def train(model, steps, precision="bf16", max_norm=1.0):
        engine = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

        def take_model_step():
            if scaler.is_enabled():
                scaler.unscale_(optimizer)
            if scaler.is_enabled() or not broken:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()

        for batch in BATCHES[:steps]:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16 if precision == "bf16" else torch.float16):
                loss = error(engine, own_share(batch))
            scaler.scale(loss).backward()
            take_model_step()

    check_same_trajectory(train, plainly, net, world)


@entry(
    "bf16-keeps-gradients",
    "DeepSpeed bf16_optimizer",
    check="check_same_trajectory",
    cause=r"the gradients of step 2 are the right ones and those of step 1 again: no zero_grad\(\)",
)
def zeroes_gradients_in_fp16_only(broken, world):
    """Zero the gradients of the bfloat16 copy in the branch of fp16, and not in the branch of bf16."""

    class Engine:
        """A model in bfloat16, and an optimizer of its weights in float32."""

        def __init__(self, model, precision="bf16"):
            self.masters, self.precision = list(model.parameters()), precision
            self.module = copy.deepcopy(model).to(torch.bfloat16)
            self.optimizer = torch.optim.SGD(self.masters, lr=0.1, momentum=0.9)

        def step(self):
            pairs = list(zip(self.masters, self.module.parameters(), strict=True))
            for master, low in pairs:
                master.grad = low.grad.float()
                dist.all_reduce(master.grad)
                master.grad /= dist.get_world_size()
            self.optimizer.step()
            if self.precision == "fp16" or not broken:
                self.module.zero_grad()
            for master, low in pairs:
                low.data.copy_(master)

    def train(model, steps):
        engine = Engine(model)
        for batch in BATCHES[:steps].bfloat16():
            error(engine.module, own_share(batch)).backward()
            engine.step()

    def plain(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in BATCHES[:steps].float():
            optimizer.zero_grad()
            error(model, batch).backward()
            optimizer.step()

    check_same_trajectory(train, plain, net, world, dtype=torch.bfloat16)
