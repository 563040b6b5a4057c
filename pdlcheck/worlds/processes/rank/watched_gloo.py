"""Makes every gloo group of this process a watched one.

``torch.distributed`` creates a gloo group by calling the class that its module names ``ProcessGroupGloo``; a
watched group takes that name. It holds a real gloo group and hands it the calls that the controller grants.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.patches import Patches
from pdlcheck.errors import Unsupported
from pdlcheck.worlds import handles, jit_wait
from pdlcheck.worlds.processes.rank.announce import Announcer
from pdlcheck.worlds.processes.rank.cuda_aware import CudaAwareEngine
from pdlcheck.worlds.processes.rank.watched_groups import being_made, meet_in_new_group, numbered
from pdlcheck.worlds.watch import WatchedGroup

__all__ = ["watch_gloo"]

_GLOO = dist.ProcessGroup.BackendType.GLOO


def watch_gloo(announcer: Announcer) -> None:
    """From now on, gloo groups announce what they are asked to do."""
    _self_test()
    meet_in_new_group(announcer)
    Patches([*handles.PATCHES, *jit_wait.PATCHES]).put_for_good()
    real_class = c10d.ProcessGroupGloo

    class Named(type(WatchedGroup)):  # type: ignore[misc]  # pybind's
        """A gloo group that was made by another name, as torch's rpc makes one, is one for ``isinstance`` too."""

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, real_class) or super().__instancecheck__(group)

    class WatchedGloo(WatchedGroup, metaclass=Named):
        """One rank's end of a gloo group whose calls are compared before they are made."""

        def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, **options: Any) -> None:
            gloo = real_class(store, rank, size, timeout=timeout, **options)  # torch 2.14 has one more
            real = dist.ProcessGroup(store, rank, size)  # what torch itself puts around a backend
            real._set_default_backend(_GLOO)
            _register(real, gloo)
            made = being_made[-1]
            engine = CudaAwareEngine(announcer, real)
            super().__init__(made.name, rank, made.members, engine, "gloo", made.among)
            # C++ code that asks for the backend itself (DDP's logger, monitored_barrier) finds it
            _register(self, gloo)
            self.options = SimpleNamespace()  # torch writes name and members there
            numbered(self)

        def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
            try:
                dist.ProcessGroup.monitored_barrier(self, *args, **kwargs)  # type: ignore[attr-defined]  # no stub
            except RuntimeError:
                announcer.is_torn = True
                raise

    c10d.ProcessGroupGloo = WatchedGloo  # type: ignore[misc, assignment]  # the point of this module


def _register(group: dist.ProcessGroup, gloo: Any) -> None:
    """For the devices that torch itself registers gloo for: the CPU, and CUDA even where there is none."""
    for device in dist.Backend.backend_capability["gloo"]:
        group._register_backend(torch.device(device), _GLOO, gloo)


def _self_test() -> None:
    """Fail with a reason on a torch that lacks a name this module is built on."""
    if not hasattr(c10d, "ProcessGroupGloo"):
        raise Unsupported(
            f"watched processes do not know torch {torch.__version__}: distributed_c10d lacks ProcessGroupGloo; "
            "use ProcessWorld(watch=False), or a torch from the tested range"
        )
