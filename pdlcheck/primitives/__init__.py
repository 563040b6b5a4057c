"""What is verified: plain functions over ``torch.distributed`` to import into other projects.

PageRank is in ``pdlcheck.primitives.pagerank``, the digits are in ``pdlcheck.primitives.digits``.
"""

from pdlcheck.primitives.comm import (
    ring_all_gather,
    ring_all_reduce,
    ring_pass,
    ring_reduce_scatter,
    star_broadcast,
    tree_broadcast,
)
from pdlcheck.primitives.comm_hooks import (
    PowerSGDState,
    TopKState,
    bf16_compress,
    fp16_compress,
    power_sgd,
    top_k,
)
from pdlcheck.primitives.data import gather_shard_digests, shard_digest, shard_indices
from pdlcheck.primitives.data_parallel import DataParallel, DistributedDataParallel, WorkerMemory, memory_by_worker
from pdlcheck.primitives.networks import FunctionNet, LeNet, function_samples
from pdlcheck.primitives.sync import average_parameters, broadcast_parameters, sync_gradients
from pdlcheck.primitives.training import train_local_sgd, train_synchronous

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "FunctionNet",
    "LeNet",
    "PowerSGDState",
    "TopKState",
    "WorkerMemory",
    "average_parameters",
    "bf16_compress",
    "broadcast_parameters",
    "fp16_compress",
    "function_samples",
    "gather_shard_digests",
    "memory_by_worker",
    "power_sgd",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_pass",
    "ring_reduce_scatter",
    "shard_digest",
    "shard_indices",
    "star_broadcast",
    "sync_gradients",
    "top_k",
    "train_local_sgd",
    "train_synchronous",
    "tree_broadcast",
]
