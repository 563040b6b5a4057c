"""The meeting of a launch: rank 0 publishes its address for the other ranks in a file or in torch's rendezvous."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pdlcheck.errors import WorldUnavailable
from pdlcheck.launch.environment import Launch, is_loopback
from pdlcheck.launch.key import KEY_VARIABLE
from pdlcheck.launch.waiting import reported
from pdlcheck.time_budgets import MEETING_NOTICE_S, MEETING_S
from pdlcheck.worlds.agents.door import Door, enter
from pdlcheck.worlds.agents.interfaces import outward_address
from pdlcheck.worlds.launched.meeting_file import MeetingFile

__all__ = ["Listener", "reach"]

_RANK_0 = "pdlcheck/rank0"
_PLACE = "MASTER_ADDR and MASTER_PORT, or --init-method, must name rank 0's host and a port that is free there"
_BESIDE = (
    "rank 0 writes this file: it must run as the same user, with the same TMPDIR, or pass --init-method file:///PATH"
)
_CURE = "export MASTER_ADDR=... MASTER_PORT=..."


class Listener:
    """Rank 0's end of the meeting: it publishes the address and accepts connections.

    Raises:
        WorldUnavailable: the meeting place cannot be made.
    """

    def __init__(self, launch: Launch) -> None:
        try:
            self._open(launch)
        except (OSError, dist.DistError) as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            cure = _CURE if _file_of(launch) is None else "--init-method file:///PATH"
            raise WorldUnavailable(
                f"rank 0 cannot wait for the others at {launch.init_method}: {why}"
                + (f"; {_PLACE}" if cure == _CURE else ""),
                world="launched",
                cure=cure,
            ) from error

    def _open(self, launch: Launch) -> None:
        self._file: MeetingFile | None = None
        path = _file_of(launch)
        key = launch.key if path is None else secrets.token_bytes(32)
        self._door = Door(_host_of(launch), key, launch.world_size)
        self.host, self.port = self._door.host, self._door.port
        place = {"host": self.host, "port": self.port}
        try:
            if path is not None:
                self._file = MeetingFile(path, json.dumps(place | {"key": key.hex()}))
            else:
                self._store = _store(launch, MEETING_S)
                self._store.set(_RANK_0, json.dumps(place))
        except BaseException:
            self._door.close()
            raise

    def accept(self, until: float, asked: Connection[Any, Any] | None = None) -> Connection[Any, Any]:
        """Wait for a process, like :meth:`Door.accept`."""
        return self._door.accept(until, asked)

    def strangers(self) -> str:
        """Return the part of an error message about processes with a wrong key; empty if there were none."""
        if not self._door.refused:
            return ""
        cure = f", is {KEY_VARIABLE} the same on every node?" if self._file is None else ""
        return f"; processes at {', '.join(sorted(set(self._door.refused)))} came with another key{cure}"

    def all_are_here(self) -> None:
        """Remove the meeting file, which only newcomers need."""
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Stop listening."""
        self.all_are_here()
        self._door.close()


def reach(launch: Launch) -> Iterator[Connection[Any, Any]]:
    """Yield connections from this rank to rank 0, one for each request of the caller.

    Raises:
        WorldUnavailable: rank 0 does not answer.
    """
    name = f"rank {launch.rank} of {launch.world_size} ({launch.launcher})"
    with reported(lambda: f"{name} waits for rank 0 at {launch.init_method}", first_s=MEETING_NOTICE_S):
        place, first = _found(launch, time.monotonic() + MEETING_S)
    yield first
    while True:
        yield enter(*place)


def _found(launch: Launch, until: float) -> tuple[tuple[str, int, bytes], Connection[Any, Any]]:
    while True:
        why = ""
        try:
            place = _read(launch, until)
            return place, enter(*place)
        except PermissionError as error:
            raise WorldUnavailable(
                f"rank {launch.rank} does not look for rank 0 at {launch.init_method}: {error}",
                world="launched",
                cure="--init-method file:///PATH",
            ) from error
        except AuthenticationError:
            why = f"; who listens there has another key, is {KEY_VARIABLE} the same on every node?"
        except (OSError, EOFError, dist.DistError, ValueError, KeyError):  # rank 0 does not listen yet, or no longer
            pass
        if time.monotonic() > until:
            advice, cure = (_PLACE, _CURE) if _file_of(launch) is None else (_BESIDE, "--init-method file:///PATH")
            raise WorldUnavailable(
                f"rank {launch.rank} cannot reach rank 0 through {launch.init_method} within {MEETING_S:g} s; "
                f"{advice}{why}",
                world="launched",
                cure=cure,
            )
        time.sleep(0.05)


def _host_of(launch: Launch) -> str:
    """Return the address at which the other ranks can reach rank 0."""
    if launch.local_world_size == launch.world_size:
        return "127.0.0.1"
    given = urlparse(launch.init_method).hostname if launch.init_method.startswith("tcp://") else None
    given = given or os.environ.get("MASTER_ADDR")
    address = socket.gethostbyname(given or socket.gethostname())
    if is_loopback(address) and given not in ("localhost", address):
        # The name is this machine's own. Many systems give it a loopback address, which other machines cannot use.
        return outward_address() or address
    return address


def _read(launch: Launch, until: float) -> tuple[str, int, bytes]:
    path = _file_of(launch)
    if path is None:
        place = json.loads(_store(launch, max(until - time.monotonic(), 0.01)).get(_RANK_0))
        return str(place["host"]), int(place["port"]), launch.key
    place = json.loads(MeetingFile.read(path))
    return str(place["host"]), int(place["port"]), bytes.fromhex(place["key"])


def _store(launch: Launch, seconds: float) -> Store:
    found = next(rendezvous(launch.init_method, launch.rank, launch.world_size, timeout=timedelta(seconds=seconds)))
    store: Store = found[0]
    return store


def _file_of(launch: Launch) -> Path | None:
    place = urlparse(launch.init_method)
    return Path(place.path) if place.scheme == "file" else None
