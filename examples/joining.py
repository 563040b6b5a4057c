"""The process group of each example: under torchrun, under mpiexec, or in a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group() -> Iterator[None]:
    """Open a process group: gloo (and nccl for CUDA) under torchrun, MPI under mpiexec, else a world of one rank."""
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    elif {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & os.environ.keys():  # mpiexec
        import pdlcheck.worlds.mpi

        dist.init_process_group(pdlcheck.worlds.mpi.BACKEND)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def say(text: str) -> None:
    """Print the text on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)
