"""The seeds by which the processes of ranks hash strings, and so in which order they iterate over a set of them.

On a cluster each process hashes in its own way, as the interpreter chooses a seed when it starts. Ranks are forks,
which have the seed of the process that forked them. So the ranks of this machine are forked by two processes in turn:
ranks beside one another differ, and a program that follows the order of a set is seen. More processes would cost two
seconds of a core and 240 MB each, and show hardly more.

A seed that the user has chosen, a number as ``PYTHONHASHSEED`` in the environment, holds for all ranks, and one
process forks them.
"""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "hash_seed", "hash_seeds"]

VARIABLE = "PYTHONHASHSEED"
_LOCAL = 2  # processes that fork the ranks of this machine
_SEEDS = 2**32 - 1  # from 1 on; 0 switches the hashing by a seed off


def hash_seeds(seed: int, rank: int | None) -> list[str]:
    """Return the hash seed of each process that forks ranks; an empty one means that of the environment.

    Args:
        seed: of all random streams: a replay has the same order.
        rank: of a launched process, which forks this rank alone.
    """
    if os.environ.get(VARIABLE, "") not in ("", "random"):
        return [""]
    return [hash_seed(seed, number) for number in (range(_LOCAL) if rank is None else [rank])]


def hash_seed(seed: int, number: int) -> str:
    """Return that of one process."""
    return str(1 + (seed * 10_007 + number) % _SEEDS)
