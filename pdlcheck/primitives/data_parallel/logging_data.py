"""The logging data of DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from pdlcheck.primitives.data_parallel.hook_answers import name_of

if TYPE_CHECKING:
    from pdlcheck.primitives.data_parallel.distributed import DistributedDataParallel
    from pdlcheck.primitives.data_parallel.reducer import Reducer

__all__ = ["logging_data"]


def logging_data(wrapper: DistributedDataParallel, reducer: Reducer) -> dict[str, str | int]:
    """Return the options and the contents of ``wrapper``, under the names that torch's wrapper uses.

    No times are included, because they need a clock in each step.

    Args:
        wrapper: the wrapper of this rank.
        reducer: its reducer.
    """
    hook = reducer.hook
    told: dict[str, str | int] = {
        "module_name": type(wrapper.module).__name__,
        "backend_name": wrapper.process_group.name(),
        "rank": dist.get_rank(wrapper.process_group),
        "world_size": dist.get_world_size(wrapper.process_group),
        "device_ids": ", ".join(map(str, wrapper.device_ids or ())),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "is_multi_device_module": int(wrapper.is_multi_device_module),
        "has_sync_bn": int(any(isinstance(part, nn.SyncBatchNorm) for part in wrapper.module.modules())),
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "bucket_cap_bytes": wrapper.bucket_bytes_cap,
        "bucket_sizes": ", ".join(str(sum(p.nbytes for p in bucket.params)) for bucket in reducer.buckets),
        "num_parameter_tensors": len(reducer.params),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.params),
    }
    if wrapper.static_graph:
        told["static_graph"] = 1
    if hook is not None:
        told["comm_hook"] = name_of(hook[1])
    return told
