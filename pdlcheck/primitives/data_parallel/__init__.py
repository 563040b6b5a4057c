"""Data parallel training: one process with a replica for each device, and one process for each device."""

from pdlcheck.primitives.data_parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
