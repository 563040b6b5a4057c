"""webdataset 1.0.2: WebDataset(shardshuffle=...) reads the shards in the same order in every epoch.

torchrun --nproc-per-node 2 webdataset_shard_order.py    # plain gloo
python webdataset_shard_order.py                         # check_epoch_loop on the simulated cluster: fails
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist
import webdataset

from pdlcheck.checks import check_epoch_loop
from pdlcheck.worlds import get_world

NUM_SHARDS, SHARD_SIZE = 16, 6


def write(folder):
    """Write the samples 0 to 95 into 16 shards."""
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as archive:
            for index in range(shard * SHARD_SIZE, (shard + 1) * SHARD_SIZE):
                content = str(index).encode()
                member = tarfile.TarInfo(f"{index:03}.txt")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def visit(folder, dataset, epochs, **options):
    """Return the samples of each epoch on this rank."""
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    samples = webdataset.WebDataset(urls, shardshuffle=100, nodesplitter=webdataset.split_by_node, **options)
    return [[int(sample["txt"]) for sample in samples] for _ in range(epochs)]


def check(**options):
    """Check that the ranks together read all samples, in each epoch in another order."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        program = partial(visit, Path(folder), **options)
        check_epoch_loop(program, get_world("sim"), num_samples=NUM_SHARDS * SHARD_SIZE, world_size=2, tail="uneven")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        write(Path(shared[0]))
    dist.barrier()
    for options in ({}, {"detshuffle": True}):
        orders = [epoch[::SHARD_SIZE] for epoch in visit(Path(shared[0]), None, 2, **options)]
        print(f"{options}, rank {dist.get_rank()}: first samples of the shards {orders}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
