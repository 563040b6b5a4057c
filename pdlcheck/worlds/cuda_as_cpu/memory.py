"""Tensors that remember the CUDA device on which the program has put them.

The memory is that of the CPU. The mark is an attribute of the storage, so all views of a tensor have it, and it is
freed with the memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pdlcheck.compat.torch.tensors import is_wrapped, local_tensor, storage_key, unwrapped

__all__ = ["HOST", "device_index", "is_pinned", "mark", "mark_storage", "move", "pin", "share_memory"]

HOST = -1  # used as the index of the host's memory
_INDEX = "pdlcheck_cuda_index"
_PINNED = "pdlcheck_pinned"
_storage_of = Tensor.untyped_storage


def _storage(tensor: Tensor) -> Any:
    """Return the storage of a tensor; None if it has none of its own."""
    try:
        return _storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and tensors of torch.func
        return _storage(unwrapped(tensor)) if is_wrapped(tensor) else None


def _inner(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, which wraps another tensor; return any other tensor itself."""
    local = local_tensor(tensor)
    return local if isinstance(local, Tensor) else tensor


def device_index(tensor: Tensor) -> int:
    """Return the index of the CUDA device on which the program has put ``tensor``, or ``HOST``."""
    if type(tensor) is not Tensor:
        tensor = _inner(tensor)
    storage = _storage(tensor)
    return HOST if storage is None else getattr(storage, _INDEX, HOST)


def mark(tensor: Tensor, index: int) -> Tensor:
    """Mark the memory of ``tensor`` as memory of device ``index``; a meta tensor has none."""
    if type(tensor) is not Tensor:
        tensor = _inner(tensor)
    storage = _storage(tensor)
    if storage is not None and storage.device.type == "cpu":
        mark_storage(storage, index)
    return tensor


def mark_storage(storage: Any, index: int) -> None:
    """Mark ``storage`` as memory of device ``index``."""
    if index != HOST:
        setattr(storage, _INDEX, index)
    elif hasattr(storage, _INDEX):
        delattr(storage, _INDEX)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether both are views of one memory."""
    first, second = _storage(_inner(one)), _storage(_inner(other))
    return first is not None and second is not None and storage_key(first) == storage_key(second)


def move(made: Tensor, source: Tensor, index: int) -> Tensor:
    """Return ``made``, which was converted from ``source``, as memory of device ``index``.

    As between a host and its devices, data for another device is a copy, and data that is there already is itself.
    """
    if device_index(source) != index and share_memory(made, source):
        made = made.clone()
    if not share_memory(made, source):
        mark(made, index)
    return made


def pin(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as pinned memory: itself if it is pinned already, else a copy."""
    if is_pinned(tensor):
        return tensor
    pinned = mark(tensor.clone(), HOST)
    setattr(_storage(pinned), _PINNED, True)
    return pinned


def is_pinned(tensor: Tensor) -> bool:
    """Return whether :func:`pin` has made the memory of ``tensor``."""
    return bool(getattr(_storage(tensor), _PINNED, False))
