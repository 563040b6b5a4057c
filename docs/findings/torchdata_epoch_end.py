"""torchdata 0.11.0: after a checkpoint at the end of an epoch, the next epoch is empty.

torchrun --nproc-per-node 2 torchdata_epoch_end.py    # plain gloo
python torchdata_epoch_end.py                         # check_shards on the simulated cluster: fails
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from pdlcheck.checks import check_shards
from pdlcheck.worlds import get_world


def loader_of(num_samples, rank, world_size, stateful=True, num_workers=0):
    kind = StatefulDistributedSampler if stateful else DistributedSampler
    sampler = kind(range(num_samples), num_replicas=world_size, rank=rank)
    return StatefulDataLoader(range(num_samples), batch_size=2, sampler=sampler, num_workers=num_workers)


def resumed_epoch(num_samples, *, rank, world_size, epoch, **options):
    """Return the samples of the epoch after a checkpoint at the end of the epoch before."""
    first, resumed = (loader_of(num_samples, rank, world_size, **options) for _ in range(2))
    first.sampler.set_epoch(epoch - 1)
    list(first)
    resumed.load_state_dict(first.state_dict())
    resumed.sampler.set_epoch(epoch)
    return [sample for batch in resumed for sample in batch.tolist()]


def check(shards=resumed_epoch):
    """Check that the ranks together visit all samples of the second epoch."""
    check_shards(shards, get_world("sim"), num_samples=28, world_size=2, epoch=1)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for options in ({}, {"num_workers": 2}, {"stateful": False}):
        number = len(resumed_epoch(28, rank=rank, world_size=world_size, epoch=1, **options))
        if rank == 0:
            print(f"{options}: {number} of {28 // world_size} samples", flush=True)
    dist.destroy_process_group()
