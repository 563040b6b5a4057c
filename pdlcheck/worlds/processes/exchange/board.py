"""Memory that the ranks of one machine share with the controller; in it, each rank publishes its operations.

Most operations match. Their ranks see this on the board and launch them at once, because an announcement to the
controller costs a round trip. The controller reads the operations later. It judges only those that do not match or do
not come.

Each rank has a row of words, one word for each operation: a digest of the call and, in the lowest bits, the rank's
progress (see ``agreement.py``). Each rank also has a log of its operations, a ring that the controller empties. A rank
writes only its own row and log. The controller writes only how far it has read.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from pdlcheck.worlds.processes.exchange.agreement import ABSENT, GOES
from pdlcheck.worlds.processes.exchange.anonymous_file import anonymous_file

__all__ = ["Board", "SpoiledBoard", "digest_of", "place_of", "shared_file"]

_STATE = 7  # the bits of a word in which a rank writes its progress
_CALLS = 0xFF << 3  # the bits of a digest that identify its call
_WORD = 8
_WORDS = 1 << 16  # words in a row; rarely, a newer operation takes the word of an older one
_LOG = 1 << 18  # bytes of a log, including its head
# The head of a log: the bytes written and read, the call of its entries, the flag of `open_to_all`, and whether an
# operation of this call in the state GOES has lost its word to another one.
_HEAD = 5 * _WORD
_WRITTEN, _READ, _CALL, _OPEN, _COVERED = range(5)
_ROOM = _LOG - _HEAD


class SpoiledBoard(RuntimeError):
    """The error for shared memory that other code has overwritten."""

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"the memory that rank {rank} shares with the controller was overwritten: native code in a rank writes "
            "outside of its own memory; build it with -fsanitize=address, or run it under valgrind"
        )
        self.rank = rank


class Board:
    """One view of the shared memory.

    Args:
        fd: the descriptor that :func:`shared_file` returns.
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
        """Write the progress of ``rank`` with the operation of this digest.

        Returns:
            The digest of the operation that loses its word and is no longer visible; 0 if there is none.
        """
        row, place = self._rows[rank], place_of(digest)
        word = row[place]
        before = word & ~_STATE
        if before != digest and word & _STATE == GOES and word & _CALLS == digest & _CALLS:
            self._heads[rank][_COVERED] = 1  # first, because another rank may look at this moment
        row[place] = digest | state
        return before if before != digest else 0

    def states(self, ranks: Sequence[int], digest: int) -> list[int]:
        """Return the progress of each of these ranks with the operation; ``ABSENT`` also if another has its word."""
        place, rows = place_of(digest), self._rows
        words = [rows[rank][place] for rank in ranks]
        return [word & _STATE if word & ~_STATE == digest else ABSENT for word in words]

    def may_have_gone(self, ranks: Sequence[int], digest: int) -> bool:
        """Return whether one of these ranks is in the state ``GOES``, or may have been before it lost the word."""
        for rank in ranks:
            word = self._rows[rank][place_of(digest)]
            if word & ~_STATE == digest:
                if word & _STATE == GOES:
                    return True
            elif word & _CALLS == digest & _CALLS and self._heads[rank][_COVERED]:
                return True
        return False

    def open_to_all(self, rank: int) -> None:
        """Record that ``rank`` has a receive from any source: only the controller can match its messages."""
        self._heads[rank][_OPEN] = 1

    def is_open_to_all(self, rank: int) -> bool:
        """Return whether the rank has called :meth:`open_to_all` in the present call."""
        return bool(self._heads[rank][_OPEN])

    # -- the log of a rank -------------------------------------------------------------------------

    def clear(self, rank: int, call: int) -> None:
        """Delete the log of the rank; later entries belong to this call."""
        head = self._heads[rank]
        head[_WRITTEN] = head[_READ] = head[_OPEN] = head[_COVERED] = 0
        head[_CALL] = call

    def log(self, rank: int, entry: Any) -> int | None:
        """Add an entry; return how many halves of the log have been filled, None if there is no room."""
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
        """Read the entries since the last call of this method, which makes room for others.

        There are none while the rank has not begun this call, because new entries may replace the old ones at any
        moment.

        Raises:
            SpoiledBoard: the memory does not hold entries.
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
        except Exception as error:  # bytes that are not a pickle may raise anything
            raise SpoiledBoard(rank) from error
        head[_READ] = written
        return taken

    def close(self) -> None:
        """Release the memory."""
        for view in self._views:
            view.release()
        self._memory.close()


def digest_of(call: int, what: object) -> int:
    """Return a number for an operation, which is equal on ranks that post the same operation.

    Ranks have different hash seeds, so ``hash`` would differ between them. The ``repr`` of ``what`` does not.
    """
    number = int.from_bytes(blake2b(repr((call, what)).encode(), digest_size=8).digest(), "little")
    return (number << 11 | call << 3 & _CALLS) & 0xFFFF_FFFF_FFFF_FFFF


def place_of(digest: int) -> int:
    """Return the index of the word for this digest in a row."""
    return (digest >> 11) % _WORDS


def shared_file(world_size: int) -> int:
    """Make the file behind the boards of one pool; return its descriptor."""
    fd = anonymous_file("pdlcheck board")
    os.truncate(fd, _size(world_size))
    return fd


def _size(world_size: int) -> int:
    return world_size * (_WORDS * _WORD + _LOG)
