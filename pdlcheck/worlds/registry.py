"""The table of worlds by name. A new world is one module and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlcheck.worlds.protocol import World

__all__ = ["WORLDS", "get_world", "when_made", "worlds_on"]

_listeners: list[Callable[[World], object]] = []


def _sim(device: str, **options: Any) -> World:
    from pdlcheck.worlds.simulated import SimulatedWorld

    return SimulatedWorld(device=device, **options)


def _gloo(**options: Any) -> World:
    from pdlcheck.worlds.processes import ProcessWorld

    return ProcessWorld(backend="gloo", **options)


def _mpi(**options: Any) -> World:
    from pdlcheck.worlds.processes import ProcessWorld

    return ProcessWorld(backend="mpi", **options)


def _nccl(**options: Any) -> World:
    from pdlcheck.worlds.processes import ProcessWorld

    return ProcessWorld(backend="nccl", **options)


WORLDS: dict[str, Callable[..., World]] = {"gloo": _gloo, "mpi": _mpi, "nccl": _nccl, "sim": _sim}


def get_world(name: str, *, device: str | None = None, **options: Any) -> World:
    """Return a new world.

    Args:
        name: ``sim`` (simulated ranks in this process), ``gloo`` (local processes), ``mpi`` (local processes in a run
            of mpiexec) or ``nccl`` (local processes, each with a CUDA device of its own).
        device: the device of the ranks, ``cpu`` or ``cuda``; default: ``cuda`` on ``nccl``, ``cpu`` elsewhere. ``sim``
            and ``gloo`` take both. Ranks of ``gloo`` share the available CUDA devices; ranks of ``sim`` use the first.
        options: the options of the world. All worlds take ``seed``, ``timeout_s`` and ``comm_wrappers``, the modules
            whose callers appear in reports. ``sim``, ``gloo`` and ``mpi`` take ``cuda_as_cpu``, which runs the CUDA
            code of ranks on the CPU. ``sim`` also takes ``semantics``, ``schedule``, ``faults``, ``topology``,
            ``timeline`` and ``own_globals``; the others take ``watch`` and ``threads_per_rank``.

    Raises:
        ValueError: there is no world of that name, or no such device.
        WorldUnavailable: the world's ranks cannot have that device.

    Example:
        >>> get_world("sim").run(lambda: 7, world_size=2)
        [7, 7]
    """
    if name not in WORLDS:
        raise ValueError(f"world must be one of {', '.join(sorted(WORLDS))}; got {name!r}")
    from pdlcheck.worlds.devices import choose_device

    world = WORLDS[name](device=choose_device(name, device), **options)
    for listener in _listeners:
        listener(world)
    return world


def when_made(listener: Callable[[World], object]) -> None:
    """Call ``listener`` with each new world from now on, before anything has run on it."""
    if listener not in _listeners:
        _listeners.append(listener)


def worlds_on(device: str) -> list[str]:
    """Return the names of the worlds whose ranks have this kind of device by default.

    Example:
        >>> worlds_on("cpu"), worlds_on("cuda")
        (['gloo', 'mpi', 'sim'], ['nccl'])
    """
    from pdlcheck.worlds.devices import choose_device

    return sorted(name for name in WORLDS if choose_device(name, None) == device)
