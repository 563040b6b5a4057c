"""pytorch-ignite 0.5.5: a user's sampler in auto_dataloader seeds the global generator alike on all ranks.

torchrun --nproc-per-node 2 ignite_sampler_seed.py    # plain gloo
python ignite_sampler_seed.py                         # check_random_streams on the simulated cluster: fails
"""

from __future__ import annotations

import os

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.distributed.auto import DistributedProxySampler
from torch import nn
from torch.utils.data import WeightedRandomSampler

from pdlcheck.checks import check_random_streams
from pdlcheck.worlds import get_world


def make(weighted=True):
    """Seed each rank with a number of its own; return a loader and a layer that draws random numbers."""
    idist.utils.sync()
    torch.manual_seed(1 + dist.get_rank())
    sampler = {"sampler": WeightedRandomSampler([1.0] * 24, 24)} if weighted else {"shuffle": True}
    return idist.auto_dataloader(torch.arange(24.0), batch_size=8, **sampler), nn.Dropout()


def masks(made):
    """Return the dropout masks of an epoch."""
    loader, dropout = made
    return [dropout(torch.ones(6)).int().tolist() for _ in loader]


def check(start=make):
    """Check that ranks draw random numbers of their own, except for the order of the samples."""
    world = get_world("sim", own_globals=["ignite.distributed.utils"])
    agreed = [DistributedProxySampler.__iter__] if start is make else []
    check_random_streams(start, masks, world, agreed=agreed)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    for weighted in (True, False):
        made = make(weighted)
        first, second = masks(made)[0], masks(made)[0]
        print(f"rank {dist.get_rank()}, weighted={weighted}: epoch 1 {first}, epoch 2 {second}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
