"""The hash seeds of rank processes, which decide the order in which a process iterates over a set of strings.

On a cluster each process has its own hash seed, because the interpreter chooses one when it starts. Ranks are forks and
have the seed of the process that forked them. So two processes fork the ranks of this machine in turn. Neighbouring
ranks differ, and a program that depends on the order of a set is detected. Each further process would cost two seconds
of a core and 240 MB, and would detect hardly more.

If the user sets ``PYTHONHASHSEED`` to a number in the environment, all ranks have this seed, and one process forks
them.
"""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "hash_seed", "hash_seeds"]

VARIABLE = "PYTHONHASHSEED"
_LOCAL = 2  # processes that fork the ranks of this machine
_SEEDS = 2**32 - 1  # from 1 on; 0 turns hash randomisation off


def hash_seeds(seed: int, rank: int | None) -> list[str]:
    """Return the hash seed of each process that forks ranks; an empty one means the environment's seed.

    Args:
        seed: the seed of all random streams, so that a replay has the same order.
        rank: the rank of a launched process, which forks only this rank.
    """
    if os.environ.get(VARIABLE, "") not in ("", "random"):
        return [""]
    return [hash_seed(seed, number) for number in (range(_LOCAL) if rank is None else [rank])]


def hash_seed(seed: int, number: int) -> str:
    """Return the hash seed of one process."""
    return str(1 + (seed * 10_007 + number) % _SEEDS)
