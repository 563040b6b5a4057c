"""Memory that the ranks of one machine share with the controller: what each rank has posted, for all to see.

Most operations fit together. Their ranks see that here and go on at once; the controller, to which an announcement is
a round trip, reads of them later, and judges only what does not fit or does not come.

Each rank has a row of words, one word an operation: a digest of the call and, in the lowest bits, how far the rank
has got. Each rank also has a log of what it posted, a ring that the controller empties. A rank writes its own row and
log only, the controller how far it has read.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from pdlcheck.worlds.processes.exchange.nameless import nameless_file

__all__ = ["ABSENT", "ASKS", "GOES", "POSTED", "WAITS", "Board", "SpoiledBoard", "digest_of", "place_of", "shared_file"]

ABSENT = 0  # not there yet, or no longer
POSTED = 1  # there, and about something else
WAITS = 2  # there, and looks for the others
ASKS = 3  # has turned to the controller
GOES = 4  # has seen that all others are there
_STATE = 7
_CALLS = 0xFF << 3  # the bits of a digest that tell its call
_WORD = 8
_WORDS = 1 << 16  # in a row; an older operation gives way to a newer one in its place, which is rare
_LOG = 1 << 18  # bytes of a log, its head included
# of a log: how many bytes were written and read, the call that they are about, see `open_to_all`; whether an operation
# of the call that goes has had its word taken by another one
_HEAD = 5 * _WORD
_WRITTEN, _READ, _CALL, _OPEN, _COVERED = range(5)
_ROOM = _LOG - _HEAD


class SpoiledBoard(RuntimeError):
    """Something else was written into the memory that ranks share."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"the memory that rank {rank} shares with the controller was overwritten: native code in a rank writes "
            "outside of its own memory; build it with -fsanitize=address, or run it under valgrind"
        )
        self.rank = rank


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

    def say(self, rank: int, digest: int, state: int) -> int:
        """Write how far ``rank`` has got with the operation of this digest.

        Return the digest of the operation that gives way, of which nobody sees any more how far it has got; 0 if none.
        """
        row, place = self._rows[rank], place_of(digest)
        word = row[place]
        before = word & ~_STATE
        if before != digest and word & _STATE == GOES and word & _CALLS == digest & _CALLS:
            self._heads[rank][_COVERED] = 1  # first, for whoever looks at this moment
        row[place] = digest | state
        return before if before != digest else 0

    def states(self, ranks: Sequence[int], digest: int) -> list[int]:
        """How far each of these ranks has got with it; ``ABSENT`` also for one that posted something else."""
        place, rows = place_of(digest), self._rows
        words = [rows[rank][place] for rank in ranks]
        return [word & _STATE if word & ~_STATE == digest else ABSENT for word in words]

    def may_have_gone(self, ranks: Sequence[int], digest: int) -> bool:
        """Whether one of these ranks goes with it, or may have said so before another operation took the word."""
        for rank in ranks:
            word = self._rows[rank][place_of(digest)]
            if word & ~_STATE == digest:
                if word & _STATE == GOES:
                    return True
            elif word & _CALLS == digest & _CALLS and self._heads[rank][_COVERED]:
                return True
        return False

    def open_to_all(self, rank: int) -> None:
        """``rank`` has a receive from anybody: only the controller can tell which message is whose."""
        self._heads[rank][_OPEN] = 1

    def is_open_to_all(self, rank: int) -> bool:
        """Whether it has said so in the present call."""
        return bool(self._heads[rank][_OPEN])

    # -- the log of a rank -------------------------------------------------------------------------

    def clear(self, rank: int, call: int) -> None:
        """Forget what the rank has logged; what comes is about this call."""
        head = self._heads[rank]
        head[_WRITTEN] = head[_READ] = head[_OPEN] = head[_COVERED] = 0
        head[_CALL] = call

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

        Raises:
            SpoiledBoard: what is there is none of them.
        """
        head, log = self._heads[rank], self._logs[rank]
        if head[_CALL] != call:
            return []
        written, read = head[_WRITTEN], head[_READ]
        begin, size = read % _ROOM, written - read
        if not 0 <= size <= _ROOM:
            raise SpoiledBoard(rank)
        data = bytes(log[_HEAD + begin : _HEAD + min(begin + size, _ROOM)])
        data += bytes(log[_HEAD : _HEAD + size - len(data)])
        entries, taken = io.BytesIO(data), []
        try:
            while entries.tell() < size:
                taken.append(pickle.load(entries))
        except Exception as error:  # of bytes that are no pickle, anything
            raise SpoiledBoard(rank) from error
        head[_READ] = written
        return taken

    def close(self) -> None:
        """Give the memory back."""
        for view in self._views:
            view.release()
        self._memory.close()


def digest_of(call: int, what: object) -> int:
    """A number for an operation that is equal on ranks that mean the same.

    Ranks have hash seeds of their own, so ``hash`` would differ between them; the ``repr`` of ``what`` does not.
    """
    number = int.from_bytes(blake2b(repr((call, what)).encode(), digest_size=8).digest(), "little")
    return (number << 11 | call << 3 & _CALLS) & 0xFFFF_FFFF_FFFF_FFFF


def place_of(digest: int) -> int:
    """Which word of a row tells of it."""
    return (digest >> 11) % _WORDS


def shared_file(world_size: int) -> int:
    """Make the file behind the boards of one pool; return its descriptor."""
    fd = nameless_file("pdlcheck board")
    os.truncate(fd, _size(world_size))
    return fd


def _size(world_size: int) -> int:
    return world_size * (_WORDS * _WORD + _LOG)
