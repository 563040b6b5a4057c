"""The execution of a rank process's CUDA code on the CPU, from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from pdlcheck.worlds.cuda_as_cpu.mode import in_mode
from pdlcheck.worlds.rank_devices import RankDevices

__all__ = ["cuda_on_cpu", "run_cuda_on_cpu", "runs_cuda_on_cpu", "select_first_device"]

_devices: RankDevices | None = None
_first = 0
_until_the_end = ExitStack()


def run_cuda_on_cpu(count: int, own: torch.device, backend: str) -> None:
    """Run the CUDA code of this process on the CPU from now on.

    Args:
        count: number of ranks on this node.
        own: the device that this rank was given.
        backend: backend of the default group, in place of NCCL.
    """
    global _devices, _first
    from pdlcheck.worlds.cuda_as_cpu.exchange import exchanged  # it imports FSDP, which few ranks need

    _first = own.index or 0
    _devices = RankDevices(count, _first, backend)
    _until_the_end.enter_context(exchanged(lambda: _devices, processes=True))


def runs_cuda_on_cpu() -> bool:
    """Return whether CUDA code of this process runs on the CPU."""
    return _devices is not None


def select_first_device() -> None:
    """Make the rank's first device the current one again, and forget its streams; whatever ran here before."""
    if _devices is not None:
        _devices.current = _first
        _devices.streams.clear()


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Run the block in the mode of this rank's devices, if it has any."""
    if _devices is None:
        yield
        return
    with in_mode(_devices):
        yield
