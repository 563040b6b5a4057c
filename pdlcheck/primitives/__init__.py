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
from pdlcheck.primitives.data import gather_shard_digests, shard_digest, shard_indices
from pdlcheck.primitives.local_sgd import LocalSGD
from pdlcheck.primitives.networks import FunctionNet, LeNet, function_samples
from pdlcheck.primitives.outer import DiLoCo
from pdlcheck.primitives.sync import average_parameters, broadcast_parameters, sync_gradients
from pdlcheck.primitives.training import train_local_sgd, train_synchronous

__all__ = [
    "DiLoCo",
    "FunctionNet",
    "LeNet",
    "LocalSGD",
    "average_parameters",
    "broadcast_parameters",
    "function_samples",
    "gather_shard_digests",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_pass",
    "ring_reduce_scatter",
    "shard_digest",
    "shard_indices",
    "star_broadcast",
    "sync_gradients",
    "train_local_sgd",
    "train_synchronous",
    "tree_broadcast",
]
