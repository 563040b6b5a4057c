"""Which rank this process is. It knows before it joins a group, as a template of ranks never does.

And whether it runs what it was started for: a file that it imports may run a world, that code may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["own_rank", "own_world_size", "runs_users_code", "take_rank", "users_code"]

_rank, _world_size = 0, 1
_runs_users_code = False


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


@contextmanager
def users_code() -> Iterator[None]:
    """A function of the user's runs in the block, or a test of theirs."""
    global _runs_users_code
    before, _runs_users_code = _runs_users_code, True
    try:
        yield
    finally:
        _runs_users_code = before


def runs_users_code() -> bool:
    """True in a rank, while it does."""
    return _runs_users_code
