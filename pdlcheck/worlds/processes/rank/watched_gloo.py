"""The watched class that replaces ``ProcessGroupGloo``, so that every gloo group of this process is watched.

``torch.distributed`` creates a gloo group by calling the class that its module names ``ProcessGroupGloo``. A watched
class takes that name. Each of its groups holds a real gloo group, and calls it once an operation may be launched.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.compat.patches import Patches
from pdlcheck.compat.torch.c10d import register_backend, set_default_backend
from pdlcheck.errors import Unsupported
from pdlcheck.worlds import handles, jit_wait
from pdlcheck.worlds.observe import WatchedGroup
from pdlcheck.worlds.processes.rank.coordinator import OperationCoordinator
from pdlcheck.worlds.processes.rank.cuda_aware import CudaAwareEngine
from pdlcheck.worlds.processes.rank.watched_groups import being_made, meet_in_new_group, numbered

__all__ = ["watch_gloo"]

_GLOO = dist.ProcessGroup.BackendType.GLOO


def watch_gloo(coordinator: OperationCoordinator) -> None:
    """Make all gloo groups that are created from now on announce their operations.

    Raises:
        Unsupported: this torch lacks a name that the watched class needs.
    """
    _self_test()
    meet_in_new_group(coordinator)
    Patches([*handles.PATCHES, *jit_wait.PATCHES]).put_for_good()
    real_class = c10d.ProcessGroupGloo

    class Named(type(WatchedGroup)):  # type: ignore[misc]  # a metaclass of pybind
        """A metaclass by which ``isinstance`` also accepts real gloo groups, such as the one that torch's rpc makes."""

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, real_class) or super().__instancecheck__(group)

    class WatchedGloo(WatchedGroup, metaclass=Named):
        """One rank's end of a gloo group whose calls are compared before they are made."""

        def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, **options: Any) -> None:
            gloo = real_class(store, rank, size, timeout=timeout, **options)  # torch 2.14 has one more option
            real = dist.ProcessGroup(store, rank, size)  # torch itself wraps a backend in the same way
            set_default_backend(real, _GLOO)
            _register(real, gloo)
            made = being_made[-1]
            engine = CudaAwareEngine(coordinator, real)
            super().__init__(made.name, rank, made.members, engine, "gloo", made.among)
            # Some C++ code asks for the backend itself: DDP's logger and monitored_barrier.
            _register(self, gloo)
            self.options = SimpleNamespace()  # torch writes name and members there
            numbered(self)

        def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
            try:
                dist.ProcessGroup.monitored_barrier(self, *args, **kwargs)  # type: ignore[attr-defined]  # no stub
            except RuntimeError:
                coordinator.is_torn = True
                raise

    c10d.ProcessGroupGloo = WatchedGloo  # type: ignore[misc, assignment]  # it replaces the class on purpose


def _register(group: dist.ProcessGroup, gloo: Any) -> None:
    """Register gloo for the same devices as torch does: the CPU, and CUDA even if there is none."""
    for device in dist.Backend.backend_capability["gloo"]:
        register_backend(group, torch.device(device), _GLOO, gloo)


def _self_test() -> None:
    """Raise ``Unsupported`` on a torch that lacks a name on which this module depends."""
    if not hasattr(c10d, "ProcessGroupGloo"):
        raise Unsupported(
            f"watched processes do not know torch {torch.__version__}: distributed_c10d lacks ProcessGroupGloo; "
            "use ProcessWorld(watch=False), or a torch from the tested range"
        )
