"""Bugs of random numbers: masks that agree where they must differ, and differ where they must agree."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pdlcheck.checks import check_random_streams, check_same_trajectory

from .entry import entry
from .tensor_parallel import CopyToModelParallelRegion, ReduceFromModelParallelRegion, own_part


@entry(
    "dropout-same-on-dp",
    "transformers #31412",
    check="check_random_streams",
    cause=r"torch.manual_seed\(42\) on both: add the rank to the seed",
)
def seeds_every_rank_alike(broken, world):
    """Every data-parallel rank calls set_seed with the same number, so the dropout masks are the same."""
    seed = 42

    def make():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        torch.manual_seed(seed if broken else seed + dist.get_rank())
        ddp = DistributedDataParallel(model)
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)

    def training_step(made):
        model, optimizer = made
        x = torch.arange(8.0).view(2, 4) + dist.get_rank()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    check_random_streams(make, training_step, world)


class RngStatesTracker:
    """The random numbers of divided activations, apart from those of whole ones."""

    def __init__(self, seed):
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self):
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(outside)


class ParallelBlock(nn.Module):
    """A divided MLP with dropout inside, and dropout on its sum over ranks, in front of the residual and the norm."""

    def __init__(self, tracker):
        super().__init__()
        first, last = torch.randn(8, 4), torch.randn(4, 8)
        self.columns, self.rows = nn.Parameter(own_part(first, 0)), nn.Parameter(own_part(last, 1))
        self.inner_dropout, self.residual_dropout, self.norm = nn.Dropout(0.1), nn.Dropout(0.1), nn.LayerNorm(4)
        self.tracker = tracker

    def forward(self, x):
        hidden = torch.tanh(CopyToModelParallelRegion.apply(x) @ self.columns.T)
        with self.tracker.fork():
            hidden = self.inner_dropout(hidden)
        whole = ReduceFromModelParallelRegion.apply(hidden @ self.rows.T)
        return self.norm(x + self.residual_dropout(whole))


def seeded_block(broken, seed=42):
    torch.manual_seed(seed)
    block = ParallelBlock(RngStatesTracker(seed + 2718 + dist.get_rank()))
    if broken:
        torch.manual_seed(seed + dist.get_rank())
    return block, torch.optim.SGD(block.parameters(), lr=0.1)


def training_step(made):
    block, optimizer = made
    optimizer.zero_grad()
    block(torch.arange(8.0).view(2, 4)).square().sum().backward()
    optimizer.step()


@entry(
    "tp-dropout-differs",
    "InternLM #405",
    check="check_random_streams",
    cause="both hold the whole activation there, so their masks must be equal: seed the ranks of a set alike",
)
def seeds_tensor_parallel_ranks_by_rank(broken, world):
    """Every tensor-parallel rank has its own seed, so the dropout of the whole activation differs between ranks."""

    def make():
        return seeded_block(broken)

    def divided(made):
        return [made[0].inner_dropout]

    check_random_streams(make, training_step, world, same_samples=[(0, 1)], divided=divided)


@entry(
    "ckpt-recompute-rng",
    "OLMo-core #828",
    check="check_same_trajectory",
    cause="the backward pass runs layer 'block.2' again with other random numbers than the forward pass",
)
def recomputes_with_other_masks(broken, world):
    """Recomputation of a checkpointed block draws other dropout masks."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))

    def checkpointed(block, x):
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=not broken)

    def train_with(run_block):
        def train(model, steps):
            torch.manual_seed(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(steps):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
                optimizer.zero_grad()
                model.head(run_block(model.block, model.embed(x))).square().mean().backward()
                optimizer.step()

        return train

    plain = train_with(lambda block, x: block(x))
    check_same_trajectory(train_with(checkpointed), plain, Net, world, world_size=1)


class TurnedClouds(Dataset):
    """Points that are turned and scaled with the random numbers of NumPy and of Python."""

    clouds = torch.linspace(-1, 1, 96).view(16, 2, 3)

    def __len__(self):
        return len(self.clouds)

    def __getitem__(self, i):
        angle = np.random.uniform(-np.pi, np.pi)
        turn = torch.tensor([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        return (self.clouds[i] @ turn.float() * random.uniform(0.8, 1.2)).flatten()


def seed_worker(worker, first):
    np.random.seed(first + worker)
    random.seed(first + worker)


@entry(
    "worker-seed-without-rank",
    "DepthContrast; YOLOv5; transformers",
    check="check_random_streams",
    cause="worker_init_fn gives workers of both ranks one seed: add rank",
)
def seeds_workers_by_their_number_alone(broken, world):
    """Seed the workers of a DataLoader by their number, which is the same on all ranks."""
    num_workers, seed = 1, 17

    def make():
        torch.manual_seed(seed)
        model = nn.Linear(6, 1)
        torch.manual_seed(seed + dist.get_rank())
        dataset, first = TurnedClouds(), seed if broken else seed + num_workers * dist.get_rank()
        loader = DataLoader(
            dataset,
            batch_size=4,
            sampler=DistributedSampler(dataset),
            num_workers=num_workers,
            worker_init_fn=partial(seed_worker, first=first),
        )
        return model, loader

    def train_epoch(made):
        model, loader = made
        for batch in loader:
            model(batch).square().mean().backward()

    check_random_streams(make, train_epoch, world, steps=1)
