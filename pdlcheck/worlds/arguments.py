"""Checks of the arguments that every world takes, made before anything starts."""

from __future__ import annotations

from typing import Any

from pdlcheck.faults import DrawnFaults, Fault
from pdlcheck.worlds.choices import MOST_RANKS

__all__ = ["check_faults", "check_function", "check_names", "check_world_size"]


def check_function(fn: Any) -> None:
    """Raise unless ``fn`` can be called."""
    if not callable(fn):
        raise TypeError(
            f"world.run takes a function, which every rank calls, got {fn!r:.80}; "
            "pass it without calling it: world.run(fn, *args, world_size=2)"
        )


def check_world_size(world_size: Any) -> None:
    """Raise unless ``world_size`` is an integer between 1 and the largest world size."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, got {world_size!r}; pass the number of ranks, such as 2")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}; pass the number of ranks, such as 2")
    if world_size > MOST_RANKS:
        raise ValueError(f"world_size must be at most {MOST_RANKS}, got {world_size}; pass the number of ranks")


def check_names(argument: str, names: Any) -> tuple[str, ...]:
    """Return the module names given for ``argument`` as a tuple; raise if they are not a list of strings."""
    given = names if isinstance(names, str) else list(names)
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{argument} takes a list of modules' names, got {given!r}; pass ['mine.module']")
    return tuple(given)


def check_faults(faults: Any, world_size: int | None = None) -> tuple[Fault, ...]:
    """Return ``faults`` as a tuple; raise if an item is not a fault, or is for a rank outside ``world_size``."""
    if not isinstance(faults, list | tuple):
        raise ValueError(f"faults must be a list of faults, got {faults!r}; pass faults=[Kill(rank=1, operation=3)]")
    for fault in faults:
        if not isinstance(fault, Fault):
            raise ValueError(f"faults must be Absent, Corrupt, Kill, Slow and Stall of pdlcheck.faults; got {fault!r}")
        if world_size is not None and fault.rank >= world_size:
            raise ValueError(
                f"faults: {fault} is about rank {fault.rank} of {world_size}; name a rank from 0 to {world_size - 1}"
            )
    return faults if isinstance(faults, DrawnFaults) else tuple(faults)
