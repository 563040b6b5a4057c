"""How the processes of a launch find rank 0: it listens, and tells address and key through torch's rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.launched.environment import Launch, is_loopback
from pdlcheck.worlds.launched.interfaces import outward_address
from pdlcheck.worlds.launched.waiting import reported

__all__ = ["Listener", "reach"]

_KEY = "pdlcheck/rank0"
_PATIENCE_S = 300.0  # rank 0 may import much before it listens
_HELLO_S = 20.0
_REPORT_S = 15.0  # rank 0 may collect many tests before it listens
_PLACE = "MASTER_ADDR and MASTER_PORT, or --init-method, must name rank 0's host and a port that is free there"
_CURE = "export MASTER_ADDR=... MASTER_PORT=..."


class Listener:
    """Rank 0's end. What connects must know the key, which only the launch's store tells.

    Raises:
        WorldUnavailable: the place to meet cannot be made.
    """

    def __init__(self, launch: Launch) -> None:
        try:
            self._open(launch)
        except (OSError, dist.DistError) as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise WorldUnavailable(
                f"rank 0 cannot wait for the others at {launch.init_method}: {why}; {_PLACE}",
                world="launched",
                cure=_CURE,
            ) from error

    def _open(self, launch: Launch) -> None:
        self._launch = launch
        self.host = _host_of(launch)
        self._key = secrets.token_bytes(32)
        self._socket = socket.create_server((self.host, 0), backlog=4 * launch.world_size)
        self._directory = _private_directory(launch)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)  # of a run that was killed
            self._directory.mkdir(mode=0o700)
        self._store = _store(launch)
        self.port: int = self._socket.getsockname()[1]
        self._store.set(_KEY, json.dumps({"host": self.host, "port": self.port, "key": self._key.hex()}))

    def accept(self, until: float, asked: Connection[Any, Any] | None = None) -> Connection[Any, Any]:
        """Wait for a process of this launch.

        Args:
            until: a time of ``time.monotonic()``.
            asked: the connection to the one that is awaited, on which it says nothing meanwhile.

        Raises:
            TimeoutError: that time has come.
            EOFError: the awaited process has gone.
        """
        ends = [end for end in (self._socket, asked) if end is not None]
        while (left := until - time.monotonic()) > 0:
            ready = wait(ends, left)
            if asked in ready and self._socket not in ready:
                raise EOFError
            self._socket.settimeout(max(until - time.monotonic(), 0.001))
            connected, _ = self._socket.accept()
            with contextlib.suppress(AuthenticationError, EOFError, OSError):  # nobody of ours
                return _greeted(connected, self._key, deliver_challenge, answer_challenge)
        raise TimeoutError

    def all_are_here(self) -> None:
        """Take away what only newcomers needed."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        elif self._launch.init_method.startswith("file://"):
            Path(urlparse(self._launch.init_method).path).unlink(missing_ok=True)

    def close(self) -> None:
        """Stop listening."""
        self.all_are_here()
        self._socket.close()


def reach(launch: Launch) -> Iterator[Connection[Any, Any]]:
    """Yield connections of another rank to rank 0, as many as are asked for.

    Raises:
        WorldUnavailable: rank 0 does not answer.
    """
    name = f"rank {launch.rank} of {launch.world_size} ({launch.launcher})"
    with reported(lambda: f"{name} waits for rank 0 at {launch.init_method}", first_s=_REPORT_S):
        place, first = _found(launch, time.monotonic() + _PATIENCE_S)
    yield first
    while True:
        yield _connect(place)


def _found(launch: Launch, until: float) -> tuple[dict[str, Any], Connection[Any, Any]]:
    while True:
        with contextlib.suppress(OSError, AuthenticationError, EOFError, dist.DistError, ValueError):
            place = _read(launch, until)
            return place, _connect(place)
        if time.monotonic() > until:
            raise WorldUnavailable(
                f"rank {launch.rank} cannot reach rank 0 through {launch.init_method} within {_PATIENCE_S:g} s; "
                f"{_PLACE}",
                world="launched",
                cure=_CURE,
            )
        time.sleep(0.05)


def _host_of(launch: Launch) -> str:
    """The address at which rank 0 can be reached by the other ranks."""
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    given = urlparse(launch.init_method).hostname if launch.init_method.startswith("tcp://") else None
    given = given or os.environ.get("MASTER_ADDR")
    address = socket.gethostbyname(given or socket.gethostname())
    if is_loopback(address) and given not in ("localhost", address):
        # this machine's own name: many systems give it such an address, which leads every other machine to itself
        return outward_address() or address
    return address


def _read(launch: Launch, until: float) -> dict[str, Any]:
    directory = _private_directory(launch)
    if directory is not None and directory.stat().st_uid != os.getuid():
        raise WorldUnavailable(
            f"{directory} belongs to another user; pass --init-method file:///path/of/your/own",
            world="launched",
            cure="--init-method file:///path",
        )
    place = json.loads(_store(launch, until).get(_KEY))
    return dict(place)


def _store(launch: Launch, until: float | None = None) -> Store:
    seconds = max(until - time.monotonic(), 0.01) if until is not None else _PATIENCE_S
    if _private_directory(launch) is not None:  # it may be that of a run that was killed: look again soon
        seconds = min(seconds, 2.0)
    found = next(rendezvous(launch.init_method, launch.rank, launch.world_size, timeout=timedelta(seconds=seconds)))
    store: Store = found[0]
    return store


def _private_directory(launch: Launch) -> Path | None:
    """The directory that this package makes for its own meeting place; None where the user gave one."""
    path = Path(urlparse(launch.init_method).path)
    ours = launch.init_method.startswith("file://") and path.parent.name.startswith(f"pdlcheck-{os.getuid()}-")
    return path.parent if ours else None


def _connect(place: dict[str, Any]) -> Connection[Any, Any]:
    connected = socket.create_connection((place["host"], place["port"]), timeout=_HELLO_S)
    return _greeted(connected, bytes.fromhex(place["key"]), answer_challenge, deliver_challenge)


def _greeted(
    connected: socket.socket, key: bytes, *steps: Callable[[Connection[Any, Any], bytes], None]
) -> Connection[Any, Any]:
    """A message connection to somebody who has proved to know the key, in limited time."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection: Connection[Any, Any] = Connection(os.dup(connected.fileno()))
    with connected:
        try:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_HELLO_S), 0))
            for step in steps:
                step(connection, key)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        except BaseException:
            connection.close()
            raise
    return connection
