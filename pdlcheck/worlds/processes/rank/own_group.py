"""The first ``init_process_group`` of a program takes the default group that its rank has, as on simulated ranks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.worlds.watch import require_valid

__all__ = ["offer", "offer_groups"]

_offered: dist.ProcessGroup | None = None
_init = c10d.init_process_group


def offer_groups() -> None:
    """Once in a rank, after it has joined its own."""
    c10d.init_process_group = dist.init_process_group = _adopt


def offer(group: dist.ProcessGroup | None) -> None:
    """Before each call: nobody has taken ``group`` yet."""
    global _offered
    _offered = group


@wraps(_init)
def _adopt(*args: Any, **kwargs: Any) -> None:
    group = _offered
    if group is None or not dist.is_initialized() or dist.group.WORLD is not group:
        _init(*args, **kwargs)
    else:
        require_valid(_init, args, kwargs, group.rank(), group.size())
    offer(None)
