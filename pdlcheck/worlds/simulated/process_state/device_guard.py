"""The guard of CUDA devices in a torch that was built for CUDA, on a machine without one.

A fake tensor, as DTensor makes them, then needs a guard of devices that do not exist. Up to torch 2.11, the thread that
first needs the guard owns it, and all threads use it. If that thread is a rank and has ended, the next use crashes.

Source: pytorch/pytorch#178950.
"""

from __future__ import annotations

from functools import cache

import torch

from pdlcheck.compat.torch.cuda import own_device_guard

__all__ = ["outlives_ranks"]


@cache
def outlives_ranks() -> None:
    """Let the calling thread own the guard. Call this before ranks run, in a thread that outlives them."""
    # device_count() does not start the driver; once it is started, no forked process can use CUDA
    own = own_device_guard()
    if own is not None and torch.version.cuda is not None and torch.cuda.device_count() == 0:
        own()
