"""The controller's end of a rank's pipe: no message, however long, keeps the controller waiting."""

from __future__ import annotations

import os
import struct
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["MessagePipe"]

# as `multiprocessing.connection`, which the rank's end uses, frames a message
_SIZE, _LONG_SIZE = struct.Struct("!i"), struct.Struct("!Q")
_LONGEST, _IS_LONG = 0x7FFFFFFF, -1


class MessagePipe:
    """Sends and receives messages in pieces, as many bytes as the pipe takes or has; the rank's end may wait.

    Args:
        connection: stays the caller's to close; nobody else may use it meanwhile.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._outgoing: deque[memoryview] = deque()
        self._incoming, self._there = bytearray(_SIZE.size), 0
        self._size: int | None = None  # of the message that is coming, once that is known

    @property
    def is_behind(self) -> bool:
        """Whether the pipe was full: call :meth:`flush` when it can be written to."""
        return bool(self._outgoing)

    def send(self, data: bytes) -> None:
        """Send a message, after those that have not yet gone; a peer that has gone is noticed when it is read from."""
        size = len(data)
        header = _SIZE.pack(size) if size <= _LONGEST else _SIZE.pack(_IS_LONG) + _LONG_SIZE.pack(size)
        if size < 1 << 14:  # one call of the system instead of two
            self._outgoing.append(memoryview(header + data))
        else:
            self._outgoing += (memoryview(header), memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send of what is left as much as the pipe takes."""
        try:
            while self._outgoing:
                first = self._outgoing[0]
                sent = os.write(self._fd, first)
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                else:
                    self._outgoing.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def receive(self) -> bytes | bytearray | None:
        """Return the next message; None as long as a part of it is missing.

        Raises:
            EOFError: the other end is closed.
        """
        while True:
            while self._there < len(self._incoming):
                try:
                    count = os.readv(self._fd, [memoryview(self._incoming)[self._there :]])
                except BlockingIOError:
                    return None
                except OSError as error:
                    raise EOFError from error
                if not count:
                    raise EOFError
                self._there += count
            if self._size is not None:
                message = self._incoming
                self._expect(_SIZE.size, None)
                return message
            if len(self._incoming) == _LONG_SIZE.size:
                size: int = _LONG_SIZE.unpack(self._incoming)[0]
            else:
                size = _SIZE.unpack(self._incoming)[0]
            if size == _IS_LONG:
                self._expect(_LONG_SIZE.size, None)
            else:
                self._expect(size, size)

    def _expect(self, count: int, size: int | None) -> None:
        self._incoming, self._there, self._size = bytearray(count), 0, size
