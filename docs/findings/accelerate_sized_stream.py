"""accelerate 1.15.0: gather_for_metrics keeps the repeated samples of an IterableDataset that has a length.

torchrun --nproc-per-node 2 accelerate_sized_stream.py    # plain gloo
python accelerate_sized_stream.py                         # check_metric on the simulated cluster: fails
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

from pdlcheck.checks import check_metric
from pdlcheck.worlds import get_world

VALUES = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.5])


class Stream(IterableDataset):
    """An iterable data set with a length."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)


def evaluate(values, streamed=True, dispatch_batches=False):
    """Return the mean of the gathered samples, and their number."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch_batches))
    loader = accelerator.prepare(DataLoader(Stream(values) if streamed else values, batch_size=2))
    gathered = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    return {"mean": gathered.mean().item(), "samples": len(gathered)}


def check(evaluation=evaluate):
    """Compare the report of two ranks with that of one process."""
    check_metric(evaluation, [VALUES], get_world("sim"))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        check()
    dist.init_process_group("gloo")
    for options in ({}, {"streamed": False}, {"dispatch_batches": True}):
        report = evaluate(VALUES, **options)
        if dist.get_rank() == 0:
            print(f"{options}: {report}, the data set: {VALUES.mean():.5f} of {len(VALUES)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
