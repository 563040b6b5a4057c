"""The controller's end of a rank's pipe; no message, however long, blocks the controller."""

from __future__ import annotations

import os
import pickle
import struct
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, cast

from pdlcheck.worlds.processes.exchange.messages import Message, Report

__all__ = ["MessagePipe", "NoMessage", "report_of"]

# The rank's end uses `multiprocessing.connection`; this is its format of a message.
_SIZE, _LONG_SIZE = struct.Struct("!i"), struct.Struct("!Q")
_LONGEST, _IS_LONG = 0x7FFFFFFF, -1
_BEGIN = b"\x80"  # first byte of every message, because a message is a pickle
_MOST = 1 << 48  # bytes; every message that fits into a machine is shorter
_FIRST_LOOK = 1 << 16  # bytes that are read before memory for the announced size is allocated
_SHOWN = 40  # bytes of a wrong message that an error shows


class NoMessage(EOFError):
    """The error for data that is not a message; nothing after it can be read. ``begin`` is its first bytes."""

    def __init__(self, begin: bytes) -> None:
        super().__init__(f"{begin[:_SHOWN]!r} is no message")
        self.begin = begin[:_SHOWN]


class MessagePipe:
    """The sender and receiver of messages in pieces: as many bytes as the pipe takes or has. The rank's end may block.

    Args:
        connection: the caller closes it; no other code may use it meanwhile.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._fd = connection.fileno()
        os.set_blocking(self._fd, False)
        self._outgoing: deque[memoryview] = deque()
        self._incoming, self._there = bytearray(_SIZE.size), 0
        self._size: int | None = None  # of the message that is being received, once it is known
        self._header = b""  # the bytes that announced the size

    @property
    def is_behind(self) -> bool:
        """Return whether the pipe was full; then call :meth:`flush` when it is writable."""
        return bool(self._outgoing)

    def send(self, data: bytes) -> None:
        """Send a message after all unsent ones; a peer that has ended is detected when the pipe is read."""
        size = len(data)
        header = _SIZE.pack(size) if size <= _LONGEST else _SIZE.pack(_IS_LONG) + _LONG_SIZE.pack(size)
        if size < 1 << 14:  # one system call instead of two
            self._outgoing.append(memoryview(header + data))
        else:
            self._outgoing += (memoryview(header), memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send as much of the unsent data as the pipe takes."""
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
        """Return the next message; None while a part of it is missing.

        Raises:
            NoMessage: other code has written into the pipe.
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
                if self._size and not self._incoming.startswith(_BEGIN):
                    raise NoMessage(self._header + self._incoming[: self._there])
            if self._size is not None:
                if self._there < self._size:
                    self._make_room(self._size)
                    continue
                message = self._incoming
                self._expect(_SIZE.size, None)
                return message
            if len(self._incoming) == _LONG_SIZE.size:
                size: int = _LONG_SIZE.unpack(self._incoming)[0]
            else:
                size = _SIZE.unpack(self._incoming)[0]
            self._header = bytes(self._incoming)
            if size == _IS_LONG:
                self._expect(_LONG_SIZE.size, None)
                continue
            if not 0 <= size <= _MOST:
                raise NoMessage(self._header)
            self._expect(min(size, _FIRST_LOOK), size)

    def _make_room(self, size: int) -> None:
        """Make room for the whole message after its first bytes."""
        begun = self._incoming
        self._incoming = bytearray(size)
        self._incoming[: len(begun)] = begun

    def _expect(self, count: int, size: int | None) -> None:
        self._incoming, self._there, self._size = bytearray(count), 0, size


def report_of(data: bytes | bytearray) -> Report:
    """Return the message of a rank.

    Raises:
        NoMessage: the data is not one of pdlcheck's messages.
    """
    try:
        message = pickle.loads(data)
    except Exception as error:  # bytes that are not a pickle may raise anything
        raise NoMessage(bytes(data)) from error
    if not isinstance(message, Message):
        raise NoMessage(bytes(data))
    return cast(Report, message)
