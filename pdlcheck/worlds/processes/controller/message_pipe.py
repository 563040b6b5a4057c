"""The controller's end of a rank's pipe: no message, however long, keeps the controller waiting."""

from __future__ import annotations

import os
import pickle
import struct
from collections import deque
from multiprocessing.connection import Connection
from typing import Any, cast

from pdlcheck.worlds.processes.exchange.messages import Message, Report

__all__ = ["MessagePipe", "NoMessage", "report_of"]

# as `multiprocessing.connection`, which the rank's end uses, frames a message
_SIZE, _LONG_SIZE = struct.Struct("!i"), struct.Struct("!Q")
_LONGEST, _IS_LONG = 0x7FFFFFFF, -1
_BEGIN = b"\x80"  # of every message, which is a pickle
_MOST = 1 << 48  # bytes, of any message that fits into a machine
_FIRST_LOOK = 1 << 16  # bytes that are taken before there is room for all that are said to come
_SHOWN = 40  # bytes of what is none


class NoMessage(EOFError):
    """What came is no message, so that nothing after it can be read; ``begin`` are its first bytes."""

    def __init__(self, begin: bytes) -> None:
        super().__init__(f"{begin[:_SHOWN]!r} is no message")
        self.begin = begin[:_SHOWN]


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
        self._header = b""  # which said so

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
            NoMessage: somebody else has written into the pipe.
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
        """For all of a message of which the first bytes are there."""
        begun = self._incoming
        self._incoming = bytearray(size)
        self._incoming[: len(begun)] = begun

    def _expect(self, count: int, size: int | None) -> None:
        self._incoming, self._there, self._size = bytearray(count), 0, size


def report_of(data: bytes | bytearray) -> Report:
    """What a rank has said.

    Raises:
        NoMessage: it is none of ours.
    """
    try:
        message = pickle.loads(data)
    except Exception as error:  # of bytes that are no pickle, anything
        raise NoMessage(bytes(data)) from error
    if not isinstance(message, Message):
        raise NoMessage(bytes(data))
    return cast(Report, message)
