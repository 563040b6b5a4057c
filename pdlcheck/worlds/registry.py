"""The worlds by name. A new world is one module and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlcheck.worlds.protocol import World

__all__ = ["WORLDS", "get_world"]


def _sim(**options: Any) -> World:
    from pdlcheck.worlds.simulated import SimulatedWorld

    return SimulatedWorld(**options)


def _gloo(**options: Any) -> World:
    from pdlcheck.worlds.processes import ProcessWorld

    return ProcessWorld(backend="gloo", **options)


def _mpi(**options: Any) -> World:
    from pdlcheck.worlds.processes import ProcessWorld

    return ProcessWorld(backend="mpi", **options)


WORLDS: dict[str, Callable[..., World]] = {"gloo": _gloo, "mpi": _mpi, "sim": _sim}


def get_world(name: str, **options: Any) -> World:
    """Return a new world.

    Args:
        name: ``sim`` (simulated ranks in this process), ``gloo`` (local processes) or ``mpi`` (local processes in a run
            of mpiexec).
        options: what the world takes: ``seed``; for ``sim`` also ``semantics``; for ``gloo`` and ``mpi``
            also ``watch``, ``timeout_s`` and ``threads_per_rank``.

    Raises:
        ValueError: there is no world of that name.

    Example:
        >>> get_world("sim").run(lambda: 7, world_size=2)
        [7, 7]
    """
    if name not in WORLDS:
        raise ValueError(f"world must be one of {', '.join(sorted(WORLDS))}; got {name!r}")
    return WORLDS[name](**options)
