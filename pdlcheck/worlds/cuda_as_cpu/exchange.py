"""The exchange of the names of ``replaced.py`` in torch, and their restoration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp.sharded_grad_scaler  # before a default group exists: an argument default keeps the group
import torch.serialization as serialization

from pdlcheck.compat.patches import Patch, Patches
from pdlcheck.compat.torch.serialization import unregister_package
from pdlcheck.compat.torch.tensors import untyped_storage_of
from pdlcheck.worlds.cuda_as_cpu import memory
from pdlcheck.worlds.cuda_as_cpu.replaced import replaced_names
from pdlcheck.worlds.rank_devices import RankDevices, devices_of_caller, find_devices_by, is_cuda

__all__ = ["exchanged"]

_BEFORE_TORCHS = 5  # the priority of torch's own entry for CUDA is 20


@contextmanager
def exchanged(find: Callable[[], RankDevices | None], *, processes: bool = False) -> Iterator[None]:
    """Run CUDA calls of ranks on the CPU while the block runs.

    Args:
        find: returns the devices of the calling thread's rank; None for a thread that belongs to no rank.
        processes: whether the ranks are processes.
    """
    find_devices_by(find)
    serialization.register_package(_BEFORE_TORCHS, _tag, _restored)
    try:
        with _table(processes):
            yield
    finally:
        unregister_package(_restored)
        find_devices_by(None)


@cache
def _table(processes: bool) -> Patches:
    rows = []
    for owner_name, name, make in replaced_names(processes=processes):
        owner = _find(owner_name)
        if hasattr(owner, name):  # this version of torch may lack the name
            everywhere = isinstance(owner, ModuleType)
            rows.append(Patch(owner, name, make, "CUDA code of ranks runs on the CPU", everywhere))
    return Patches(rows)


def _find(name: str) -> Any:
    module, _, kind = name.partition(":")
    if module == "torch.UntypedStorage":
        return torch.UntypedStorage
    owner = import_module(module)
    return getattr(owner, kind) if kind else owner


def _tag(storage: Any) -> None:
    """Return None: a file then names the CPU, where the tensors are."""


def _restored(storage: Any, location: str) -> Any:
    """Mark a storage as memory of the CUDA device that the file, or ``map_location``, names.

    ``torch.load`` calls this for each storage.
    """
    devices = devices_of_caller()
    if devices is None or not is_cuda(location):
        return None
    memory.mark_storage(untyped_storage_of(storage), devices.index(location))
    return storage
