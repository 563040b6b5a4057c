"""Arguments that every world takes, checked before anything starts."""

from __future__ import annotations

from typing import Any

__all__ = ["ISOLATIONS", "check_isolation", "check_world_size"]

ISOLATIONS = ("pool", "reinit", "fresh")


def check_world_size(world_size: Any) -> None:
    """Raise unless ``world_size`` is an integer of at least 1."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int, got {world_size!r}; pass the number of ranks, such as 2")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}; pass the number of ranks, such as 2")


def check_isolation(isolation: Any) -> str:
    """Return ``isolation`` if it is one of the ways to keep runs apart."""
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation must be one of {', '.join(ISOLATIONS)}; got {isolation!r}")
    return str(isolation)
