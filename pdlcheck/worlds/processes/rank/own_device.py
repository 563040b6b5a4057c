"""The device of this rank process."""

from __future__ import annotations

import platform

import torch

from pdlcheck.worlds.devices import check_devices, device_name, why_no_cuda
from pdlcheck.worlds.outcome import text_of

__all__ = ["own_device", "select_own_device", "take_device", "was_lost"]

_own = torch.device("cpu")


def take_device(kind: str, backend: str, local_rank: int) -> torch.device:
    """Choose the device of this rank, before it joins a group.

    Raises:
        RuntimeError: the process that forked this one has used CUDA, or this machine has no CUDA device.
        WorldTooSmall: with nccl, it has too few.
    """
    global _own
    if kind == "cuda":
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "the fork server has used CUDA, which does not survive a fork: a pytest plugin or module that it "
                "imports calls torch.cuda when it is imported; call it later, in a fixture or hook"
            )
        if why := why_no_cuda():
            raise RuntimeError(f"a rank on {platform.node()} needs CUDA: {why}")
        devices = torch.cuda.device_count()
        if backend == "nccl":
            check_devices(local_rank + 1, devices)
        _own = torch.device(device_name(local_rank, devices))
        select_own_device()
    return _own


def own_device() -> torch.device:
    """The device that this rank was given."""
    return _own


def select_own_device() -> None:
    """Make it the current one, whatever ran here before."""
    if _own.type == "cuda":
        torch.cuda.set_device(_own)


def was_lost(error: BaseException) -> bool:
    """Whether this process cannot use its device any more: an error inside CUDA stays until the process ends.

    Example:
        >>> was_lost(RuntimeError("CUDA error: device-side assert triggered"))
        True
        >>> was_lost(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        False
    """
    return isinstance(error, RuntimeError) and "CUDA error:" in text_of(error)
