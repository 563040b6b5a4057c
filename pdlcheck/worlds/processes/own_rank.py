"""Which rank this process is. It knows before it joins a group, as a template of ranks never does."""

from __future__ import annotations

__all__ = ["own_rank", "own_world_size", "take_rank"]

_rank, _world_size = 0, 1


def take_rank(rank: int, world_size: int) -> None:
    """When the process starts."""
    global _rank, _world_size
    _rank, _world_size = rank, world_size


def own_rank() -> int:
    """From 0 to the world size - 1."""
    return _rank


def own_world_size() -> int:
    """Number of ranks of the default group."""
    return _world_size
