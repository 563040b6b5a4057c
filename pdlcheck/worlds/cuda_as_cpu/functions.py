"""Replacements for functions of ``torch.cuda`` and ``torch.accelerator`` on a rank whose devices are the CPU."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pdlcheck.cores import usable_cores
from pdlcheck.errors import Unsupported
from pdlcheck.worlds.rank_devices import is_cuda, require_devices

__all__ = [
    "NAME",
    "current_device",
    "device_block",
    "device_count",
    "device_of_block",
    "do_nothing",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "mem_get_info",
    "memory_stats",
    "no_bytes",
    "refuse",
    "seed",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "synchronize",
    "the_accelerator",
    "the_index",
    "true",
]

NAME = "CPU in place of CUDA (pdlcheck --cuda-as-cpu)"


def refuse(name: str, cure: str) -> Callable[..., Any]:
    """Return a function that raises, as a replacement for one that has no counterpart on the CPU.

    Args:
        name: the name of the replaced function.
        cure: advice for the user.

    Raises:
        Unsupported: at each call of the returned function.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise Unsupported(f"{name} has no counterpart on the CPU, on which --cuda-as-cpu runs this rank; {cure}")

    return refused


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of work for a device."""


def true(*args: Any, **kwargs: Any) -> bool:
    """Return True."""
    return True


def no_bytes(*args: Any, **kwargs: Any) -> int:
    """Return 0: nothing is allocated on a CUDA device."""
    return 0


class _NoStatistics(OrderedDict[str, int]):
    """Statistics that are all 0."""

    def __missing__(self, name: str) -> int:
        return 0


def memory_stats(*args: Any, **kwargs: Any) -> OrderedDict[str, int]:
    """Return statistics that are all 0."""
    return _NoStatistics()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the whole memory of this machine, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


# -- devices ---------------------------------------------------------------------------------------


def device_count() -> int:
    """Return the number of ranks of this node: each can have a device of its own."""
    return require_devices().count


def current_device() -> int:
    """Return the index of this rank's current device."""
    return require_devices().current


def set_device(device: Any) -> None:
    """Make ``device`` the current one of this rank."""
    devices = require_devices()
    devices.current = devices.index(device)


class device_block:
    """The block ``with torch.cuda.device(...)``; None changes nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else require_devices().index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        devices = require_devices()
        self.prev_idx = devices.current
        if self.idx >= 0:
            devices.current = self.idx

    def __exit__(self, *raised: Any) -> None:
        require_devices().current = self.prev_idx


class device_of_block(device_block):
    """The block ``with torch.cuda.device_of(tensor)``."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.get_device() if isinstance(tensor, Tensor) and tensor.is_cuda else None)


def the_index(device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
    """Return the index of a device, as ``torch.cuda._utils._get_device_index`` does."""
    if allow_cpu and not is_cuda(device) and device is not None:
        return -1
    return require_devices().index(device)


def the_accelerator(check_available: bool = False) -> torch.device:
    """Return the kind of this rank's devices."""
    return torch.device("cuda")


def get_device_name(device: Any = None) -> str:
    """Return a name that explains what the device is."""
    require_devices().index(device)
    return NAME


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Return (0, 0), which is below any real device, so code that checks takes its branch without the feature."""
    require_devices().index(device)
    return 0, 0


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the name, the memory and the cores of this machine, and no capability."""
    require_devices().index(device)
    _, total = mem_get_info()
    return SimpleNamespace(
        name=NAME, total_memory=total, multi_processor_count=usable_cores(), major=0, minor=0, is_integrated=0
    )


def synchronize(device: Any = None) -> None:
    """Return at once: all work is done."""
    require_devices().index(device)


# -- random numbers: devices draw from the stream of the CPU ---------------------------------------


def get_rng_state(device: Any = "cuda") -> Tensor:
    """Return the state of the rank's random stream."""
    require_devices().index(device)
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[Tensor]:
    """Return the state for each device."""
    return [torch.default_generator.get_state()] * require_devices().count


def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
    """Set the state of the rank's random stream, if ``device`` is its current device."""
    devices = require_devices()
    if devices.index(device) == devices.current:
        torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Set the rank's random stream to the state of the current device."""
    states = list(new_states)
    current = require_devices().current
    if current < len(states):
        torch.default_generator.set_state(states[current])


def manual_seed(seed: int) -> None:
    """Seed the rank's random stream."""
    torch.default_generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the rank's random stream with a random number."""
    torch.default_generator.seed()


def initial_seed() -> int:
    """Return the seed of the rank's random stream."""
    return torch.default_generator.initial_seed()
