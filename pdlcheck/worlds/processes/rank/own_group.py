"""The default group of a rank, which a program takes by its first ``init_process_group``, as on simulated ranks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.worlds.observe import require_valid

__all__ = ["is_as_begun", "join_group", "leave_group", "offer", "offer_groups"]

_offered: dist.ProcessGroup | None = None
_is_left = False
_init = c10d.init_process_group


def offer_groups() -> None:
    """Replace ``init_process_group``; a rank calls this once, after it has joined its default group."""
    c10d.init_process_group = dist.init_process_group = _adopt


def offer(group: dist.ProcessGroup | None) -> None:
    """Offer ``group`` to the first ``init_process_group`` of the next call, unless the rank has left its groups."""
    global _offered
    _offered = None if _is_left else group


def leave_group() -> None:
    """Leave all groups; from now on, the program makes the groups that it needs."""
    global _is_left
    if dist.is_initialized():
        dist.destroy_process_group()
    offer(None)
    _is_left = True


def join_group() -> None:
    """Record that the rank will have a default group again, which programs may take."""
    global _is_left
    _is_left = False


def is_as_begun(group: dist.ProcessGroup | None) -> bool:
    """Return whether the rank still has the default group ``group``; also True after :func:`leave_group`."""
    return _is_left or (dist.is_initialized() and dist.group.WORLD is group)


@wraps(_init)
def _adopt(*args: Any, **kwargs: Any) -> None:
    group = _offered
    if group is None or not dist.is_initialized() or dist.group.WORLD is not group:
        _init(*args, **kwargs)
    else:
        require_valid(_init, args, kwargs, group.rank(), group.size())
    offer(None)
