"""The device of this rank process."""

from __future__ import annotations

import io
import pickle
import platform
from typing import Any

import torch

from pdlcheck.compat.torch.devices import is_used_before_fork
from pdlcheck.compat.torch.serialization import LOAD_STORAGE
from pdlcheck.worlds.backends import backend_of
from pdlcheck.worlds.devices import check_devices, device_name, why_no_cuda
from pdlcheck.worlds.exceptions import text_of

__all__ = ["loads_on_own_device", "own_device", "select_own_device", "take_device", "was_lost"]

_own = torch.device("cpu")
_is_real = True  # False if the device is only a name for the CPU


def take_device(kind: str, backend: str, local_rank: int, *, cuda_as_cpu: bool = False) -> torch.device:
    """Choose the device of this rank, before it joins a group, and return it.

    Raises:
        RuntimeError: the process that forked this one has used CUDA, or this machine has no CUDA device.
        WorldTooSmall: each rank needs a device of its own, as with nccl, and this machine has too few.
    """
    global _own, _is_real
    if kind == "cuda" and cuda_as_cpu:
        _own, _is_real = torch.device("cuda", local_rank), False
    elif kind == "cuda":
        if is_used_before_fork():
            raise RuntimeError(
                "the fork server has used CUDA, which does not survive a fork: a pytest plugin or module that it "
                "imports calls torch.cuda when it is imported; call it later, in a fixture or hook"
            )
        if why := why_no_cuda():
            raise RuntimeError(f"a rank on {platform.node()} needs CUDA: {why}")
        devices = torch.cuda.device_count()
        if backend_of(backend).device_for_each_rank:
            check_devices(local_rank + 1, devices)
        _own = torch.device(device_name(local_rank, devices))
        select_own_device()
    return _own


def own_device() -> torch.device:
    """Return the device that this rank was given."""
    return _own


def select_own_device() -> None:
    """Make the device of this rank the current one, whatever ran here before."""
    if _own.type == "cuda" and _is_real:
        torch.cuda.set_device(_own)


def loads_on_own_device(data: bytes) -> Any:
    """Unpickle like ``pickle.loads``, but load every CUDA tensor to the device of this rank.

    The controller has its tensors on one device, and no two ranks of nccl may use the same device.
    """
    return pickle.loads(data) if _own.type == "cpu" or not _is_real else _ToOwnDevice(io.BytesIO(data)).load()


class _ToOwnDevice(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == LOAD_STORAGE:
            return _storage_on_own_device
        return super().find_class(module_name, global_name)


def _storage_on_own_device(data: bytes) -> Any:
    """Load a storage to this rank's device; replaces ``torch.storage._load_from_bytes``, which pickled tensors call."""
    return torch.load(io.BytesIO(data), map_location=_moved, weights_only=False)


def _moved(storage: Any, location: str) -> Any:
    """Return a CUDA storage on this rank's device; return None to leave another storage to torch."""
    return storage.cuda(_own.index) if location.startswith("cuda") else None


def was_lost(error: BaseException) -> bool:
    """Return whether this process can no longer use its device: an error inside CUDA stays until the process ends.

    Example:
        >>> was_lost(RuntimeError("CUDA error: device-side assert triggered"))
        True
        >>> was_lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        False
    """
    return isinstance(error, RuntimeError) and "CUDA error:" in text_of(error)
