"""What belongs to a process group: the backend for a device, and the store of the default group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.compat.private import take

__all__ = ["backend_name", "default_store"]

default_store: Any = take(
    "torch.distributed.distributed_c10d._get_default_store",
    "the report of a failed pass of a pipeline, for ranks that lose the failed rank",
    lost="a rank of a pipeline that loses another rank does not report why",
)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that carries out a group's operations on tensors of a device."""
    backend: Any = group._get_backend(device)  # compat/torch/c10d.py has it in the table
    return str(backend.name())
