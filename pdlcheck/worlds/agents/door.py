"""The socket on which rank 0 of a launch listens.

It accepts only processes that have the key. Other processes that connect delay no process of the launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

from pdlcheck.time_budgets import HELLO_S

__all__ = ["Door", "enter"]

_AT_THE_DOOR = 64  # connections that have not proved the key yet; ranks do so in milliseconds


class Door:
    """A listening socket for the processes of a launch.

    Each side proves to the other that it has the key before anything is unpickled. The proof depends on this host and
    port, so a process in the middle cannot relay it.

    Args:
        host: the address to listen at; the port is a free one.
        key: the secret of the launch.
        world_size: number of processes in the launch.

    Attributes:
        refused: addresses of the last processes that did not have the key.
    """

    def __init__(self, host: str, key: bytes, world_size: int) -> None:
        self._socket = socket.create_server((host, 0), backlog=4 * world_size)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._key = _key_here(key, self.host, self.port)
        self._outside: deque[socket.socket] = deque()
        self._inside: deque[Connection[Any, Any]] = deque()
        self._rings, self._bell = socket.socketpair()
        self.refused: deque[str] = deque(maxlen=8)

    def accept(self, until: float, asked: Connection[Any, Any] | None = None) -> Connection[Any, Any]:
        """Wait for a process of this launch, and return the connection to it.

        Args:
            until: a time of ``time.monotonic()``.
            asked: an existing connection to the awaited process, on which it sends nothing meanwhile.

        Raises:
            TimeoutError: the time ``until`` has come.
            EOFError: the awaited process has ended.
        """
        ends = [end for end in (self._bell, self._socket, asked) if end is not None]
        while (left := until - time.monotonic()) > 0:
            ready = wait(ends, left)
            if self._bell in ready:
                self._bell.recv(1)
                return self._inside.popleft()
            if self._socket in ready:
                self._hear()
            elif asked in ready:
                raise EOFError
        raise TimeoutError

    def close(self) -> None:
        """Stop listening, and close every connection that :meth:`accept` has not returned."""
        for own in (self._socket, self._rings, self._bell):
            own.close()
        for connection in self._inside:
            connection.close()
        for newcomer in list(self._outside):
            _send_away(newcomer)

    def _hear(self) -> None:
        self._socket.settimeout(0.001)  # the newcomer may have disconnected already
        try:
            newcomer, (address, *_) = self._socket.accept()
        except OSError:
            return
        self._outside.append(newcomer)
        while len(self._outside) > _AT_THE_DOOR:
            _send_away(self._outside.popleft())  # the connection that has been silent for longest
        threading.Thread(target=self._ask, args=(newcomer, address), daemon=True).start()

    def _ask(self, newcomer: socket.socket, address: str) -> None:
        try:
            connection = _greeted(newcomer, self._key, deliver_challenge, answer_challenge)
        except AuthenticationError:
            self.refused.append(address)
        except (EOFError, OSError):  # not a process of this launch
            pass
        else:
            self._inside.append(connection)
            with contextlib.suppress(OSError):  # the door was closed meanwhile
                self._rings.send(b".")
        finally:
            with contextlib.suppress(ValueError):  # `_hear` has removed it
                self._outside.remove(newcomer)


def enter(host: str, port: int, key: bytes) -> Connection[Any, Any]:
    """Connect to the door at this host and port.

    Raises:
        AuthenticationError: the process that listens there does not have the key.
        EOFError, OSError: no process listens there, or it does not accept this one.
    """
    connected = socket.create_connection((host, port), timeout=HELLO_S)
    return _greeted(connected, _key_here(key, host, port), answer_challenge, deliver_challenge)


def _key_here(key: bytes, host: str, port: int) -> bytes:
    return hmac.digest(key, f"{host} {port}".encode(), hashlib.sha256)


def _greeted(
    connected: socket.socket, key: bytes, *steps: Callable[[Connection[Any, Any], bytes], None]
) -> Connection[Any, Any]:
    """Return a message connection to a process that has proved in limited time that it has the key."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection: Connection[Any, Any] = Connection(os.dup(connected.fileno()))
    with connected:
        try:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(HELLO_S), 0))
            for step in steps:
                step(connection, key)
        except (AssertionError, ValueError) as error:  # Python's errors for a message that is not a challenge
            connection.close()
            raise AuthenticationError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def _send_away(newcomer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has closed it
        newcomer.shutdown(socket.SHUT_RDWR)
