"""The rank and the moment of each kill, determined by a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass

KINDS = {
    "step": "before a collective of a training step, in which the others then wait",
    "moment": "any number of milliseconds after the ranks were started",
    "waiting": "while rank 0 writes and this rank waits for it",
    "write": "a part of the temporary file is written",
    "flush": "the temporary file is written, but not flushed",
    "rename": "it is flushed, but has not got its name",
    "renamed": "it has its name, but the folder is not flushed",
    "remove": "before a checkpoint that is too old is removed",
    "load": "a checkpoint is being opened after a restart",
}
_BY_RANK_0 = {"write", "flush", "rename", "renamed", "remove"}


@dataclass(frozen=True)
class Kill:
    """A SIGKILL.

    Args:
        number: number of this kill in the campaign.
        kind: one of ``KINDS``.
        rank: the rank to kill.
        count: number of the event since the ranks started, from 1, at which the kill happens.
        share: the written share of the file, or the elapsed share of two seconds.
    """

    number: int
    kind: str
    rank: int
    count: int
    share: float


def draw(seed: int, number: int, world_size: int) -> Kill:
    """Return kill ``number`` of the campaign ``seed``. Each kind occurs equally often."""
    draw = random.Random(f"{seed} {number} {world_size}")
    kind = list(KINDS)[number % len(KINDS)]
    first, last = (0, 0) if kind in _BY_RANK_0 else (1 if kind == "waiting" else 0, world_size - 1)
    count = draw.randint(1, {"step": 8, "load": 2, "remove": 2}.get(kind, 3))  # a restart opens its checkpoint twice
    return Kill(number, kind, draw.randint(first, last), count, draw.random())
