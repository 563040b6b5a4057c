"""Data parallelism on several devices: replicas in one process, or one replica in each process."""

from pdlcheck.primitives.data_parallel.distributed import DistributedDataParallel
from pdlcheck.primitives.data_parallel.memory import WorkerMemory, memory_by_worker
from pdlcheck.primitives.data_parallel.replicated import DataParallel

__all__ = ["DataParallel", "DistributedDataParallel", "WorkerMemory", "memory_by_worker"]
