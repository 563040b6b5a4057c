"""Communication hooks that send gradients as 16-bit numbers."""

# No `from __future__ import annotations`: DDP compares the hooks' annotations with the types, not with their names.

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.comm_hooks.bucket import Bucket
from pdlcheck.primitives.comm_hooks.completion import then_on_device

__all__ = ["bf16_compress", "fp16_compress"]


def fp16_compress(state: dist.ProcessGroup | None, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Return the mean of the gradients, summed as float16. This takes half the bytes of float32.

    Each rank divides its gradients by the number of ranks and rounds them to float16; the sum is in float16 too. So the
    error of a mean is about ``2**-11`` of the largest gradient, for each rank added. A sum overflows only if the mean
    itself may overflow: gradients of up to ``65504 * world_size`` fit. (torch's hook rounds first, and loses values
    above 65504.) Values below ``3e-8 * world_size`` become 0: scale the loss. Values that do not fit become inf on
    every rank. A NaN or inf of one rank arrives on every rank, so a loss scaler skips the step everywhere.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: the bucket that DDP passes to its hook.

    Returns:
        A future of the bucket's buffer, which then holds the mean.

    Raises:
        TypeError: the gradients are not real floating point numbers; ``state`` is not a process group.

    Example:
        >>> from torch import nn
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def step():
        ...     ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        ...     ddp.register_comm_hook(None, fp16_compress)
        ...     ddp(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        ...     return ddp.module.weight.grad.item()
        >>> world.run(step, world_size=2)
        [1.5, 1.5]

    Source: S. Li et al., "PyTorch Distributed: experiences on accelerating data parallel training", VLDB 13 (2020).
    """
    return _compress("fp16_compress", state, bucket, torch.float16)


def bf16_compress(state: dist.ProcessGroup | None, bucket: Bucket) -> torch.futures.Future[Tensor]:
    """Return the mean of the gradients, summed as bfloat16. This takes half the bytes of float32, with its range.

    It works like :func:`fp16_compress`. The error is about ``2**-8`` of the largest gradient for each rank added. No
    finite value overflows or underflows. The backend must support sums of bfloat16.

    Example:
        >>> from torch import nn
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> def step():
        ...     ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        ...     ddp.register_comm_hook(None, bf16_compress)
        ...     ddp(torch.full((1, 1), dist.get_rank() + 1e30)).sum().backward()
        ...     return ddp.module.weight.grad.item()
        >>> first, other = world.run(step, world_size=2)
        >>> first == other, abs(first - 1e30) < 1e28
        (True, True)

    Source: as :func:`fp16_compress`.
    """
    return _compress("bf16_compress", state, bucket, torch.bfloat16)


def _compress(
    caller: str, group: dist.ProcessGroup | None, bucket: Bucket, dtype: torch.dtype
) -> torch.futures.Future[Tensor]:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{caller} takes a process group or None as its state, got {type(group).__name__}")
    buffer = bucket.buffer()
    if not buffer.is_floating_point():
        raise TypeError(f"{caller} rounds real floating point gradients, got {buffer.dtype}; use another hook for them")
    narrow = (buffer / members(caller, group).world_size).to(dtype)
    work = dist.all_reduce(narrow, group=group, async_op=True)
    return then_on_device(work, group, buffer, lambda: buffer.copy_(narrow), [narrow])
