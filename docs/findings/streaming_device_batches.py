"""mosaicml-streaming 0.13.0: with device_per_stream, ranks have different numbers of batches.

torchrun --nproc-per-node 2 streaming_device_batches.py    # plain gloo
python streaming_device_batches.py                         # check_shards on the simulated cluster: fails
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from pdlcheck.checks import check_shards
from pdlcheck.worlds import get_world

BATCH_SIZE = 4
SIZES = (8, 12)  # two whole batches in the first stream, three in the second


def write(folder):
    """Write the samples 0 to 19 as two streams."""
    first = 0
    for name, size in enumerate(SIZES):
        with MDSWriter(out=str(folder / str(name)), columns={"index": "int"}) as writer:
            for index in range(first, first + size):
                writer.write({"index": index})
        first += size


def dataset_of(folder, method="device_per_stream"):
    streams = [Stream(local=str(folder / str(name))) for name in range(len(SIZES))]
    return StreamingDataset(
        streams=streams, batch_size=BATCH_SIZE, batching_method=method, num_canonical_nodes=1, shuffle_seed=0
    )


def shards(dataset, num_samples, *, rank, world_size, epoch):
    """Return the samples that the data set gives to a rank of one node; a loader skips -1."""
    work = generate_work(dataset.batching_method, dataset, World(1, world_size, 1, rank), epoch, 0)
    return [sample for sample in work[0, rank].flatten().tolist() if sample != -1]


def check(method="device_per_stream"):
    """Check that the ranks have the same number of whole batches."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        program = partial(shards, dataset_of(Path(folder), method))
        check_shards(program, get_world("sim"), num_samples=sum(SIZES), world_size=2, tail="drop", dealt_in=BATCH_SIZE)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        write(Path(shared[0]))
    dist.barrier()
    for method in ("per_stream", "device_per_stream"):
        loader = StreamingDataLoader(dataset_of(Path(shared[0]), method), batch_size=BATCH_SIZE, drop_last=True)
        batches = [batch["index"].tolist() for batch in loader]
        print(f"{method}, rank {dist.get_rank()}: len {len(loader)}, {len(batches)} batches: {batches}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
