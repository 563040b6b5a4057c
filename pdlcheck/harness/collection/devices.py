"""The division of the machine's CUDA devices among the workers of pytest-xdist."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import pytest

__all__ = ["divide_among_workers", "share_of"]

_DRIVER = Path("/proc/driver/nvidia/gpus")


def share_of(devices: Sequence[str], worker: int, workers: int) -> list[str]:
    """Return the devices of one of several workers: disjoint if there are enough, otherwise one shared device.

    Example:
        >>> [share_of("01234", worker, 2) for worker in range(2)]
        [['0', '1', '2'], ['3', '4']]
        >>> [share_of("01", worker, 3) for worker in range(3)]
        [['0'], ['1'], ['0']]
    """
    if len(devices) <= workers:
        return [devices[worker % len(devices)]] if devices else []
    base, more = divmod(len(devices), workers)
    start = worker * base + min(worker, more)
    return list(devices[start : start + base + (worker < more)])


def divide_among_workers(
    config: pytest.Config, environment: MutableMapping[str, str] = os.environ, driver: Path = _DRIVER
) -> None:
    """Let a worker of pytest-xdist see only its own devices; call this before anything uses CUDA."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = [str(number) for number in range(len(list(driver.iterdir())) if driver.is_dir() else 0)]
    else:
        devices = [name for name in visible.split(",") if name.strip()]
    if devices:
        number = int(str(worker["workerid"]).removeprefix("gw"))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(share_of(devices, number, int(worker["workercount"])))
