"""Handles of operations that are written in Python, in the hands of torch's C++."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Reducer

__all__ = ["keep_handles_of_reducers"]

_held: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()  # of each reducer, the last one


def keep_handles_of_reducers() -> None:
    """From now on the reducer of torch's DDP keeps the handle that ``join`` gives it in a forward pass.

    C++ keeps its own half alone, and where nobody has the other half the backward pass waits for ever, or finds that
    the handle has no future.
    """
    reducer: Any = Reducer
    take = reducer._set_forward_pass_work_handle
    if getattr(take, "__module__", "") == __name__:
        return

    def taken(self: Any, work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        _held[self] = work
        return take(self, work, *args, **kwargs)

    reducer._set_forward_pass_work_handle = taken
