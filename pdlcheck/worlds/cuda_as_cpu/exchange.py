"""Exchanges the names of ``replaced.py`` in torch, and gives torch its own back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.fsdp.sharded_grad_scaler  # a default argument is the default group where it is imported: none
import torch.serialization as serialization

from pdlcheck.worlds.cuda_as_cpu import memory
from pdlcheck.worlds.cuda_as_cpu.devices import RankDevices, devices_of_caller, find_devices_by, is_cuda
from pdlcheck.worlds.cuda_as_cpu.replaced import replaced_names

__all__ = ["exchanged"]

_BEFORE_TORCHS = 5  # torch's own for CUDA has 20
_ABSENT: Any = object()
# number of a module's names, and which of them are exchanged
_known: WeakKeyDictionary[ModuleType, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()


@contextmanager
def exchanged(find: Callable[[], RankDevices | None], *, processes: bool = False) -> Iterator[None]:
    """Let CUDA calls of ranks run on the CPU while the block runs.

    Args:
        find: returns the devices of the calling thread's rank; None for a thread of no rank.
        processes: the ranks are processes.
    """
    undo = []
    replacements: dict[int, tuple[Any, Any]] = {}
    find_devices_by(find)
    serialization.register_package(_BEFORE_TORCHS, _tag, _restored)
    try:
        for owner_name, name, make in replaced_names(processes=processes):
            owner = _find(owner_name)
            real = getattr(owner, name, _ABSENT)
            if real is _ABSENT:
                continue  # this torch has no such name
            own = vars(owner).get(name, _ABSENT)
            ours = make(real)
            undo.append((owner, name, own))
            setattr(owner, name, ours)
            if isinstance(owner, ModuleType):
                replacements[id(real)] = real, ours
        _rebind(replacements)
        yield
    finally:
        _rebind({id(ours): (ours, real) for real, ours in replacements.values()})
        for owner, name, own in reversed(undo):
            if own is _ABSENT:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, own)
        serialization._package_registry[:] = [p for p in serialization._package_registry if p[2] is not _restored]
        find_devices_by(None)


def _find(name: str) -> Any:
    module, _, kind = name.partition(":")
    if module == "torch.UntypedStorage":
        return torch.UntypedStorage
    owner = import_module(module)
    return getattr(owner, kind) if kind else owner


def _rebind(exchange: dict[int, tuple[Any, Any]]) -> None:
    """Modules that have imported one of the names, such as a test file, get the other object."""
    modules: list[Any] = list(sys.modules.values())  # programs put other objects there, too
    for module in modules:
        if not isinstance(module, ModuleType):
            continue
        values = vars(module)
        size, names = _known.get(module, (-1, ()))
        if size != len(values):  # else it has imported nothing since
            names = tuple([own for own, value in values.items() if id(value) in exchange])
            _known[module] = len(values), names
        for own in names:
            value = values.get(own)
            if (found := exchange.get(id(value))) is not None and found[0] is value:
                setattr(module, own, found[1])


def _tag(storage: Any) -> None:
    """A file names the CPU, where the tensors are."""


def _restored(storage: Any, location: str) -> Any:
    """What ``torch.load`` calls for each storage with the place that the file, or ``map_location``, names."""
    devices = devices_of_caller()
    if devices is None or not is_cuda(location):
        return None
    memory.mark_storage(getattr(storage, "_untyped_storage", storage), devices.index(location))
    return storage
