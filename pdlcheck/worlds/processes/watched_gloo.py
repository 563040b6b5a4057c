"""Makes every gloo group of this process a watched one.

``torch.distributed`` creates a gloo group by calling the class that its module names ``ProcessGroupGloo``; a
watched group takes that name. It holds a real gloo group and hands it the calls that the controller grants.
The members meet at the controller before they connect: a group that some of them do not make can be reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.errors import Unsupported
from pdlcheck.worlds.processes.announce import Announcer, GroupEngine
from pdlcheck.worlds.watch import Signature, WatchedGroup, user_line

__all__ = ["begin_call", "watch_gloo"]

_GLOO = dist.ProcessGroup.BackendType.GLOO
_groups: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()


def watch_gloo(announcer: Announcer) -> None:
    """From now on, gloo groups announce what they are asked to do."""
    _self_test()
    real_class, real_helper = c10d.ProcessGroupGloo, c10d._new_process_group_helper
    being_made: list[tuple[str, tuple[int, ...]]] = []  # name and members; torch does not tell the class

    def make(group_size: int, group_rank: int | None, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """In the place of torch's helper, which makes one group on one rank; returns what that returns."""
        _, _, name = args[:3]  # backend, store, name
        members = tuple(ranks) or tuple(range(group_size))
        being_made.append((str(name), members))
        try:
            if announcer.call and group_rank is not None:  # None: this rank is no member
                rank = members[group_rank]
                announcer.meet(Signature(rank, "new_group", str(name), members, where=user_line()))
            return real_helper(group_size, group_rank, ranks, *args, **kwargs)
        finally:
            being_made.pop()

    class WatchedGloo(WatchedGroup):
        """One rank's end of a gloo group whose calls are compared before they are made."""

        def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
            gloo = real_class(store, rank, size, timeout=timeout)
            real = dist.ProcessGroup(store, rank, size)  # what torch itself puts around a backend
            real._set_default_backend(_GLOO)
            real._register_backend(torch.device("cpu"), _GLOO, gloo)
            name, members = being_made[-1]
            super().__init__(name, rank, members, GroupEngine(announcer, real), "gloo")
            # C++ code that asks for the backend itself (DDP's logger, monitored_barrier) finds it
            self._register_backend(torch.device("cpu"), _GLOO, gloo)
            self.options = SimpleNamespace()  # torch writes name and members there
            _groups.add(self)

        def _set_sequence_number_for_group(self) -> None:
            """Counted by the watched group itself."""

    c10d.ProcessGroupGloo = WatchedGloo  # type: ignore[misc, assignment]  # the point of this module
    c10d._new_process_group_helper = make  # type: ignore[assignment]  # it passes everything on


def begin_call() -> None:
    """Collectives are numbered from 0 in each call."""
    for group in _groups:
        group._calls.clear()


def _self_test() -> None:
    """Fail with a reason on a torch that lacks a name this module is built on."""
    names = ("ProcessGroupGloo", "_new_process_group_helper")
    missing = [name for name in names if not hasattr(c10d, name)]
    if missing:
        raise Unsupported(
            f"watched processes do not know torch {torch.__version__}: "
            f"distributed_c10d lacks {', '.join(missing)}; "
            "use ProcessWorld(watch=False), or a torch from the tested range"
        )
