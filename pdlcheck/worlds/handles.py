"""The handles of operations written in Python that torch's C++ code keeps."""

from __future__ import annotations

import weakref
from functools import wraps
from typing import Any

import torch.distributed as dist

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.torch.c10d import KEEP_FORWARD_HANDLE

__all__ = ["PATCHES"]

_held: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()  # the last handle of each reducer


def _keep(take: Any) -> Any:
    """Return a method that makes the reducer of torch's DDP keep the Python handle ``join`` passes in a forward pass.

    C++ keeps only its own half of the handle. If no Python reference keeps the other half alive, the backward pass
    waits for ever, or fails because the handle has no future.
    """

    @wraps(take)
    def taken(self: Any, work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        _held[self] = work
        return take(self, work, *args, **kwargs)

    return taken


PATCHES = (
    Patch(
        KEEP_FORWARD_HANDLE.owner,
        KEEP_FORWARD_HANDLE.attribute,
        _keep,
        "C++ keeps half of a handle that Python made",
    ),
)
