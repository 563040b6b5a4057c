"""The rank of this process, and whether it runs user code.

The rank is set before the process joins a group; a template of ranks never joins one. A file that a rank imports may
run a world, but the user's function or test on a rank may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["own_rank", "own_world_size", "runs_users_code", "take_rank", "users_code"]

_rank, _world_size = 0, 1
_runs_users_code = False


def take_rank(rank: int, world_size: int) -> None:
    """Set the rank and the world size; called when the process starts."""
    global _rank, _world_size
    _rank, _world_size = rank, world_size


def own_rank() -> int:
    """Return the rank of this process, from 0 to the world size - 1."""
    return _rank


def own_world_size() -> int:
    """Return the number of ranks of the default group."""
    return _world_size


@contextmanager
def users_code() -> Iterator[None]:
    """Mark the block as user code: it runs a function or a test of the user."""
    global _runs_users_code
    before, _runs_users_code = _runs_users_code, True
    try:
        yield
    finally:
        _runs_users_code = before


def runs_users_code() -> bool:
    """Return whether this rank runs user code now; always False outside a rank."""
    return _runs_users_code
