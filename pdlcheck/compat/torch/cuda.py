"""The start of CUDA devices: the seeds that wait for it, and the guard of a machine without devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlcheck.compat.private import name

__all__ = ["own_device_guard", "seed_queue"]

_SEEDS = name(
    "torch.cuda._lazy_seed_tracker",
    "the seed of a CUDA device that a simulated rank is the first to use",
    lost="such a device starts with the seed of the controller",
)
_GUARD = name(
    "torch._C._ensureCUDADeviceGuardSet",
    "a guard of CUDA devices that outlives the simulated rank that first needs it",
    lost="a torch that is built for CUDA may crash after a run with DTensor on a machine without CUDA devices",
)


def seed_queue() -> Any:
    """Return the seeds that torch applies when a device is first used; None in a torch without such a queue."""
    return getattr(_SEEDS.owner, _SEEDS.attribute, None)


def own_device_guard() -> Callable[[], None] | None:
    """Return the function that lets the calling thread own the guard of devices; None in a torch without it."""
    return getattr(_GUARD.owner, _GUARD.attribute, None)
