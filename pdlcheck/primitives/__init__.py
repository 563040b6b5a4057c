"""Distributed training primitives: plain functions over ``torch.distributed`` that other projects can import.

pdlcheck's own suites test each of them. PageRank is in ``pdlcheck.primitives.pagerank``. More pipeline functions are in
``pdlcheck.primitives.pipeline``. The digits data set is in ``pdlcheck.primitives.digits``.
"""

# Import this module before any process group exists. It captures the default group at import, and the first optimizer
# imports it. After init_process_group, that reference would keep gloo's threads alive past destroy_process_group, and
# the process could abort as it exits.
import torch.distributed.nn.functional  # noqa: F401

from pdlcheck.primitives.checkpoint import latest_checkpoint, load_checkpoint, resumable_steps, save_checkpoint
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
from pdlcheck.primitives.data import gather_shard_digests, shard_digest, shard_digest_table, shard_indices
from pdlcheck.primitives.data_parallel import DataParallel, DistributedDataParallel, WorkerMemory, memory_by_worker
from pdlcheck.primitives.diloco import DiLoCo
from pdlcheck.primitives.local_sgd import LocalSGD
from pdlcheck.primitives.networks import ConvNet, FunctionNet, LeNet, function_samples
from pdlcheck.primitives.pipeline import (
    Pipeline,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    parse_schedule,
    pipedream,
    require_valid_schedule,
    split_model,
)
from pdlcheck.primitives.precision import (
    DistributedGradScaler,
    MasterWeights,
    clip_grad_norm,
    saved_activation_bytes,
)
from pdlcheck.primitives.sampler import ShardSampler
from pdlcheck.primitives.sync import average_parameters, broadcast_parameters, sync_gradients
from pdlcheck.primitives.training import train_local_sgd, train_synchronous
from pdlcheck.primitives.uneven import all_gather_uneven

__all__ = [
    "ConvNet",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedGradScaler",
    "FunctionNet",
    "LeNet",
    "LocalSGD",
    "MasterWeights",
    "Pipeline",
    "PowerSGDState",
    "ShardSampler",
    "TopKState",
    "WorkerMemory",
    "all_gather_uneven",
    "average_parameters",
    "bf16_compress",
    "broadcast_parameters",
    "clip_grad_norm",
    "fp16_compress",
    "function_samples",
    "gather_shard_digests",
    "gpipe",
    "interleaved_1f1b",
    "latest_checkpoint",
    "load_checkpoint",
    "memory_by_worker",
    "one_f_one_b",
    "parse_schedule",
    "pipedream",
    "power_sgd",
    "require_valid_schedule",
    "resumable_steps",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_pass",
    "ring_reduce_scatter",
    "save_checkpoint",
    "saved_activation_bytes",
    "shard_digest",
    "shard_digest_table",
    "shard_indices",
    "split_model",
    "star_broadcast",
    "sync_gradients",
    "top_k",
    "train_local_sgd",
    "train_synchronous",
    "tree_broadcast",
]
