"""What torch keeps about CUDA devices where it was built for them and the machine has none.

A fake tensor, as DTensor makes them, then needs a guard of devices that are not there. Up to torch 2.11 the thread that
first needs it owns it, and all threads use it: when that thread, a rank, has ended, the next use is a crash.

Source: pytorch/pytorch#178950.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["outlives_ranks"]


@cache
def outlives_ranks() -> None:
    """Let this thread own the guard. To be called before ranks run, by who lives longer than they."""
    # a count that is looked up does not start the driver, after which no process could fork and use CUDA
    own = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if own is not None and torch.version.cuda is not None and torch.cuda.device_count() == 0:
        own()
