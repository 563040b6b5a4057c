"""Memory that the ranks of one machine share with the controller: what each rank has posted, for all to see.

Most operations fit together. Their ranks see that here and go on at once; the controller, to which an announcement is
a round trip, reads of them later, and judges only what does not fit or does not come.

Each rank has a row of words, one word an operation: a digest of the call and, in the two lowest bits, how far the rank
has got. Each rank also has a log of what it posted, a ring that the controller empties. A rank writes its own row and
log only, the controller how far it has read.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from typing import Any

from pdlcheck.worlds.processes.nameless import nameless_file

__all__ = ["ASKS", "GOES", "POSTED", "Board", "digest_of", "shared_file"]

POSTED, ASKS, GOES = 1, 2, 3  # says so; has turned to the controller; has seen that all others are there
_STATE = 3
_WORD = 8
_WORDS = 1024  # in a row; an older operation gives way to a newer one in its place
_LOG = 1 << 18  # bytes of a log, its head included
_HEAD = 3 * _WORD  # of a log: how many bytes were written and read, and the call that they are about
_WRITTEN, _READ, _CALL = 0, 1, 2
_ROOM = _LOG - _HEAD


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
        self._heads[rank][_WRITTEN] = self._heads[rank][_READ] = 0
        self._heads[rank][_CALL] = call

    def log(self, rank: int, entry: Any) -> int | None:
        """Add an entry; return how many times half of the log has been filled, None where there is no room."""
        data = pickle.dumps(entry, pickle.HIGHEST_PROTOCOL)
        head, log, size = self._heads[rank], self._logs[rank], len(data)
        written = head[_WRITTEN]
        if written + size - head[_READ] > _ROOM:
            return None
        begin = written % _ROOM
        before_the_end = min(size, _ROOM - begin)
        log[_HEAD + begin : _HEAD + begin + before_the_end] = data[:before_the_end]
        if before_the_end < size:
            log[_HEAD : _HEAD + size - before_the_end] = data[before_the_end:]
        head[_WRITTEN] = written + size
        return (written + size) // (_ROOM // 2)

    def take(self, rank: int, call: int) -> list[Any]:
        """Read the entries since the last time, which makes room for others.

        There are none while the rank has not begun this call: what is there may give way to new ones at any moment.
        """
        head, log = self._heads[rank], self._logs[rank]
        if head[_CALL] != call:
            return []
        written, read = head[_WRITTEN], head[_READ]
        begin, size = read % _ROOM, written - read
        data = bytes(log[_HEAD + begin : _HEAD + min(begin + size, _ROOM)])
        data += bytes(log[_HEAD : _HEAD + size - len(data)])
        entries, taken = io.BytesIO(data), []
        while entries.tell() < size:
            taken.append(pickle.load(entries))
        head[_READ] = written
        return taken

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
