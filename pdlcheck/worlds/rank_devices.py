"""The CUDA devices that a rank's code sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["RankDevices", "devices_of_caller", "find_devices_by", "is_cuda", "require_devices"]


class RankDevices:
    """The CUDA devices of one rank, which are names for the CPU.

    Args:
        count: number of devices of the rank's node.
        current: index of the current device.
        backend: the backend of the groups that replace NCCL's.
    """

    def __init__(self, count: int, current: int = 0, backend: str = "gloo") -> None:
        self.count = count
        self.current = current
        self.backend = backend
        self.streams: dict[int, Any] = {}  # the current stream of each device

    def index(self, device: Any) -> int:
        """Return the index of ``device``.

        ``device`` is an index, ``cuda``, ``cuda:1`` or a :class:`torch.device`; None is the current device.

        Raises:
            ValueError: ``device`` is not a CUDA device.
            RuntimeError: the node has no device of that index.
        """
        if device is None:
            return self.current
        if not is_cuda(device):
            raise ValueError(f"expected a CUDA device, got {device!r}; pass an index, 'cuda' or 'cuda:0'")
        index: int | None = device if isinstance(device, int) else torch.device(device).index
        if index is None or index < 0:  # torch.cuda.set_device(-1) changes nothing
            return self.current
        if index >= self.count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: found cuda:{index}, expected an index below {self.count}, the "
                "number of ranks of this node; pass the local rank, not the global one"
            )
        return index


def is_cuda(device: object) -> bool:
    """Return whether ``device``, in any form that torch accepts, is a CUDA device; an index is one.

    Example:
        >>> [is_cuda(device) for device in (1, "cuda:1", torch.device("cuda"), "cpu", "meta", None)]
        [True, True, True, False, False, False]
    """
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def _nobody() -> RankDevices | None:
    return None


_find: Callable[[], RankDevices | None] = _nobody


def find_devices_by(find: Callable[[], RankDevices | None] | None) -> None:
    """Set the function that returns the devices of its calling thread, or None for a thread that belongs to no rank."""
    global _find
    _find = find or _nobody


def devices_of_caller() -> RankDevices | None:
    """Return the devices of the rank that this thread belongs to; None for any other thread."""
    return _find()


def require_devices() -> RankDevices:
    """Return the devices of the rank that this thread belongs to."""
    devices = _find()
    assert devices is not None
    return devices
