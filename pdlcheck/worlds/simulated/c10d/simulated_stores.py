"""The ``TCPStore`` and ``FileStore`` of simulated ranks: stores in memory that are found by an address."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pdlcheck.compat.torch.stores import FileStore, TCPStore
from pdlcheck.worlds.simulated.c10d.store import NO_LIMIT, SimulatedStore, as_bytes, wait_in_store
from pdlcheck.worlds.simulated.schedules.access import StoreAccess
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, Scheduler

__all__ = ["file_store", "forget_servers", "is_served", "tcp_store"]

_IN_USE = (
    "The server socket has failed to listen on any local network address. port: {}, useIpv6: false, code: -98, name: "
    "EADDRINUSE, message: address already in use"
)


class _Contents:
    """The contents that all handles of one store share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}
        self.workers = 0  # the number of workers that have joined


class _Server:
    """The server of a store. It lives as long as a store of the master."""

    def __init__(self, port: int, multi_tenant: bool) -> None:
        self.port = port
        self.multi_tenant = multi_tenant
        self.contents = _Contents()


class _File:
    """The file of a ``FileStore``. The last store that uses the file removes it."""

    def __init__(self, path: str) -> None:
        self.values: dict[str, bytes] = {}
        weakref.finalize(self, _remove, path)


_servers: weakref.WeakValueDictionary[int, _Server] = weakref.WeakValueDictionary()  # by port, all on one machine
_files: weakref.WeakValueDictionary[str, _File] = weakref.WeakValueDictionary()  # by path
_ports = itertools.count(49152)


class OwnTCPStore(SimulatedStore):
    """One rank's end of a ``TCPStore``."""

    __class__ = property(lambda self: TCPStore)  # for isinstance
    libuvBackend = True

    def __init__(self, scheduler: Scheduler, host: str, server: _Server, is_master: bool) -> None:
        super().__init__(scheduler, server.contents.values)
        self.host, self.port = host, server.port
        self._contents = server.contents
        self._server = server if is_master else None
        self._clones: list[OwnTCPStore] = []  # kept alive, because a PrefixStore may hold them only in C++

    def clone(self) -> OwnTCPStore:
        server = _Server(self.port, False)
        server.contents = self._contents
        other = OwnTCPStore(self._scheduler, self.host, server, False)
        other.set_timeout(self.timeout)
        self._clones.append(other)
        return other

    def has_extended_api(self) -> bool:
        return True

    def num_keys(self) -> int:
        return super().num_keys() + (self._contents.workers > 0)  # torch counts its own key

    getNumKeys = num_keys  # called by a PrefixStore, as in SimulatedStore

    def list_keys(self) -> list[str]:
        self._scheduler.poll("store.list_keys", StoreAccess((), False))
        return list(self._values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._access(True, key)
        self._contents.queues.setdefault(key, deque()).append(as_bytes(value))
        self._scheduler.progress()

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        self._access(True, key)
        queue = self._contents.queues.setdefault(key, deque())
        if not queue and not block:
            raise dist.QueueEmptyError("queue is empty")
        while not queue:  # another rank may have taken the value first
            self._wait([key])
        return queue.popleft()

    def queue_len(self, key: str) -> int:
        self._scheduler.poll(f"store.queue_len of {key!r}", StoreAccess((key,), False))
        return len(self._contents.queues.get(key, ()))

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values or self._contents.queues.get(key) for key in keys)


class OwnFileStore(SimulatedStore):
    """One rank's end of a ``FileStore``."""

    __class__ = property(lambda self: FileStore)  # for isinstance
    late = RuntimeError

    def __init__(self, scheduler: Scheduler, path: str, file: _File) -> None:
        super().__init__(scheduler, file.values)
        self.path = path
        self._file = file
        self._clones: list[OwnFileStore] = []

    def num_keys(self) -> int:
        return super().num_keys() + 1  # torch counts its own key

    def delete_key(self, key: str) -> bool:
        super().delete_key(key)
        return True  # torch's FileStore returns True for every key

    deleteKey, getNumKeys = delete_key, num_keys

    def clone(self) -> OwnFileStore:
        other = OwnFileStore(self._scheduler, self.path, self._file)  # with the default limit, as in torch
        self._clones.append(other)
        return other


def tcp_store(
    me: RankThread,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = NO_LIMIT,
    wait_for_workers: bool = True,
    multi_tenant: bool = False,
    master_listen_fd: int | None = None,
    use_libuv: bool = True,
) -> OwnTCPStore:
    """Return the store that a call of torch's ``TCPStore`` gives on the rank ``me``.

    Raises:
        DistNetworkError: the port is in use, or no rank serves it within ``timeout``.
        DistStoreError: the workers have not joined within ``timeout``.
    """
    name = f"TCPStore at port {port}"
    access = StoreAccess((name,), True)
    me.engine.scheduler.switch(access)
    server = _listen(port, multi_tenant) if is_master else _servers.get(port)
    while server is None:  # the master may have left again before this rank's turn
        if not _await(me, partial(_servers.__contains__, port), f"{name}, which no rank serves", access, timeout):
            raise dist.DistNetworkError(
                f"The client socket has timed out after {round(1000 * timeout.total_seconds())}ms while trying to "
                f"connect to ({host_name}, {port})."
            )
        server = _servers.get(port)
    store = OwnTCPStore(me.engine.scheduler, host_name, server, is_master)
    store.set_timeout(timeout)
    me.engine.scheduler.progress()
    if wait_for_workers and world_size is not None and world_size > 0:
        contents = server.contents
        contents.workers += 1
        if is_master and not _await(
            me, lambda: contents.workers >= world_size, f"{name}, for {world_size} workers to join", access, timeout
        ):
            raise dist.DistStoreError(
                f"Timed out after {timeout.total_seconds():g} seconds waiting for clients. "
                f"{contents.workers}/{world_size} clients joined."
            )
    return store


def _listen(port: int, multi_tenant: bool) -> _Server:
    if port == 0:
        port = next(number for number in _ports if number not in _servers)
    if port in _servers:
        gc.collect()  # frees stores that only a reference cycle keeps alive
    server = _servers.get(port)
    if server is None:
        server = _servers[port] = _Server(port, multi_tenant)
    elif not (multi_tenant and server.multi_tenant):
        raise dist.DistNetworkError(_IN_USE.format(port))
    return server


def _await(me: RankThread, ready: Callable[[], bool], waits_for: str, access: StoreAccess, limit: timedelta) -> bool:
    if limit < NO_LIMIT:
        return wait_in_store(me, ready, waits_for, access, limit.total_seconds())
    me.engine.scheduler.wait_until(ready, waits_for, access)
    return True


def file_store(me: RankThread, file_name: str, world_size: int = -1) -> OwnFileStore:
    """Return the store that a call of torch's ``FileStore`` gives on the rank ``me``.

    Raises:
        RuntimeError: the file cannot be opened.
    """
    path = os.path.realpath(file_name)
    me.engine.scheduler.switch(StoreAccess((f"FileStore {path}",), True))
    file = _files.get(path)
    if file is None:
        try:
            Path(path).touch()
        except OSError as error:
            raise RuntimeError(f"open({file_name}): {error.strerror}") from error
        file = _files[path] = _File(path)
    return OwnFileStore(me.engine.scheduler, file_name, file)


def _remove(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()


def is_served(port: int) -> bool:
    """Return whether a simulated rank serves a store at the port."""
    return port in _servers


def forget_servers() -> None:
    """Free all ports, after a failure or when ranks end, even if an error or a group still holds a store."""
    _servers.clear()
