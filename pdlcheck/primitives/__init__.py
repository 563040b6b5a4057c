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
from pdlcheck.primitives.data import gather_shard_digests, shard_digest, shard_digest_table, shard_indices
from pdlcheck.primitives.networks import ConvNet, FunctionNet, LeNet, function_samples
from pdlcheck.primitives.precision import (
    DistributedGradScaler,
    MasterWeights,
    clip_grad_norm,
    saved_activation_bytes,
)
from pdlcheck.primitives.sampler import ShardSampler
from pdlcheck.primitives.sync import average_parameters, broadcast_parameters, sync_gradients
from pdlcheck.primitives.training import train_local_sgd, train_synchronous

__all__ = [
    "ConvNet",
    "DistributedGradScaler",
    "FunctionNet",
    "LeNet",
    "MasterWeights",
    "ShardSampler",
    "average_parameters",
    "broadcast_parameters",
    "clip_grad_norm",
    "function_samples",
    "gather_shard_digests",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_pass",
    "ring_reduce_scatter",
    "saved_activation_bytes",
    "shard_digest",
    "shard_digest_table",
    "shard_indices",
    "star_broadcast",
    "sync_gradients",
    "train_local_sgd",
    "train_synchronous",
    "tree_broadcast",
]
