"""Bugs of moving averages of weights that some ranks do not have."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_replicas_in_sync

from .entry import entry


class MovingAverage:
    """A moving average of ``model``, which now and then replaces it."""

    def __init__(self, model, decay=0.9, replace_every=10):
        self.model, self.decay, self.replace_every = model, decay, replace_every
        self.shadow, self.updates = copy.deepcopy(model), 0

    @torch.no_grad()
    def update(self):
        self.updates += 1
        for mean, value in zip(self.shadow.parameters(), self.model.parameters(), strict=True):
            mean.mul_(self.decay).add_(value, alpha=1 - self.decay)
        if self.updates % self.replace_every == 0:
            self.model.load_state_dict(self.shadow.state_dict())


def run_denoiser(broken, world, **how):
    def start():
        denoiser = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 4))
        ddp = DistributedDataParallel(denoiser)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
        is_main = dist.get_rank() == 0
        average = None if broken and not is_main else MovingAverage(denoiser)

        def train_step(_):
            image, noise = torch.randn(2, 8, 4)
            optimizer.zero_grad()
            functional.mse_loss(ddp(image + noise), noise).backward()
            optimizer.step()
            if average is not None:
                average.update()

        return denoiser, train_step

    check_replicas_in_sync(start, world, **how)


@entry(
    "ema-copied-back-on-rank-0",
    "denoising-diffusion-pytorch, ema-pytorch",
    check="check_replicas_in_sync",
    judged="missed",
    why="the average first replaces the weights in step 10, and the default is 3 steps; steps=12 shows the bug",
    also=lambda broken, world: run_denoiser(broken, world, steps=12),
)
def replaces_the_weights_of_rank_0_by_their_average(broken, world):
    """Only the main process keeps a moving average, and every tenth update copies it into the trained model."""
    run_denoiser(broken, world)
