"""Handles of operations that are written in Python, in the hands of torch's C++."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Reducer

from pdlcheck.compat.patches import Patch

__all__ = ["PATCHES"]

_held: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()  # of each reducer, the last one


def _keep(take: Any) -> Any:
    """Return a method by which the reducer of torch's DDP keeps the handle that ``join`` gives it in a forward pass.

    C++ keeps its own half alone, and where nobody has the other half the backward pass waits for ever, or finds that
    the handle has no future.
    """

    @wraps(take)
    def taken(self: Any, work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        _held[self] = work
        return take(self, work, *args, **kwargs)

    return taken


PATCHES = (Patch(Reducer, "_set_forward_pass_work_handle", _keep, "C++ keeps half of a handle that Python made"),)
