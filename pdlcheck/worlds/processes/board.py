"""Memory that the ranks of one machine share with the controller: what each rank has posted, for all to see.

Most operations fit together. Their ranks see that here and go on at once; the controller, to which an announcement is
a round trip, reads of them later, and judges only what does not fit or does not come.

Each rank has a row of words, one word an operation: a digest of the call and, in the two lowest bits, how far the rank
has got. Each rank also has a log of what it posted, for reports. A rank writes its own row and log only.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from pdlcheck.worlds.processes.nameless import nameless_file

__all__ = ["ASKS", "GOES", "POSTED", "Board", "digest_of", "shared_file"]

POSTED, ASKS, GOES = 1, 2, 3  # says so; has turned to the controller; has seen that all others are there
_STATE = 3
_WORD = 8
_WORDS = 1024  # in a row; an older operation gives way to a newer one in its place
_LOG = 1 << 18  # bytes of a log, its head included
_HEAD = 2 * _WORD  # of a log: where it ends, and the call that it is about


class Board:
    """One view of the shared memory.

    Args:
        fd: as :func:`shared_file` gives it.
        world_size: number of ranks.
    """

    def __init__(self, fd: int, world_size: int) -> None:
        size = _size(world_size)
        self._memory = mmap.mmap(fd, size)
        whole = memoryview(self._memory)
        rows = whole[: world_size * _WORDS * _WORD].cast("Q")
        self._rows = [rows[rank * _WORDS : (rank + 1) * _WORDS] for rank in range(world_size)]
        logs = whole[world_size * _WORDS * _WORD :]
        self._logs = [logs[rank * _LOG : (rank + 1) * _LOG] for rank in range(world_size)]
        self._heads = [log[:_HEAD].cast("Q") for log in self._logs]
        self._views = [*self._heads, *self._logs, *self._rows, logs, rows, whole]

    # -- the row of a rank -------------------------------------------------------------------------

    def say(self, rank: int, digest: int, state: int) -> None:
        """Write how far ``rank`` has got with the operation of this digest."""
        self._rows[rank][(digest >> 2) % _WORDS] = digest | state

    def states(self, ranks: Sequence[int], digest: int) -> list[int]:
        """How far each of these ranks has got with it; 0 for one that is not there, or posted something else."""
        place, rows = (digest >> 2) % _WORDS, self._rows
        words = [rows[rank][place] for rank in ranks]
        return [word & _STATE if word & ~_STATE == digest else 0 for word in words]

    # -- the log of a rank -------------------------------------------------------------------------

    def clear(self, rank: int, call: int) -> None:
        """Forget what the rank has logged; what comes is about this call."""
        self._heads[rank][0] = 0
        self._heads[rank][1] = call

    def log(self, rank: int, entry: Any) -> bool:
        """Add an entry; False where the log is full."""
        data = pickle.dumps(entry, pickle.HIGHEST_PROTOCOL)
        begin = _HEAD + self._heads[rank][0]
        if begin + len(data) > _LOG:
            return False
        self._logs[rank][begin : begin + len(data)] = data
        self._heads[rank][0] += len(data)
        return True

    def logged(self, rank: int, start: int, call: int) -> Iterator[tuple[Any, int]]:
        """Yield the entries from byte ``start`` on, each with the byte at which the next one starts.

        None while the rank has not begun this call: what is there may give way to new entries at any moment.
        """
        if self._heads[rank][1] != call:
            return
        entries = io.BytesIO(self._logs[rank][_HEAD + start : _HEAD + self._heads[rank][0]])
        size = entries.getbuffer().nbytes
        while entries.tell() < size:
            entry = pickle.load(entries)
            yield entry, start + entries.tell()

    def close(self) -> None:
        """Give the memory back."""
        for view in self._views:
            view.release()
        self._memory.close()


def digest_of(call: int, what: object) -> int:
    """A number for an operation that is equal on ranks that mean the same; they come from one fork server."""
    return hash((call, what)) & 0xFFFF_FFFF_FFFF_FFFC


def shared_file(world_size: int) -> int:
    """Make the file behind the boards of one pool; return its descriptor."""
    fd = nameless_file("pdlcheck board")
    os.truncate(fd, _size(world_size))
    return fd


def _size(world_size: int) -> int:
    return world_size * (_WORDS * _WORD + _LOG)
