"""The stand-ins for torch's stores on simulated ranks: stores of the rank's network.

torch's stores wait in C++, where no other rank gets a turn to end the wait. The classes stay torch's, so code that has
imported them by name gets stand-ins too. ``isinstance`` accepts a stand-in as an instance of torch's class.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from pdlcheck.compat.patches import Patch
from pdlcheck.compat.torch.stores import FileStore, TCPStore
from pdlcheck.worlds.simulated.c10d.simulated_stores import file_store, is_served, tcp_store
from pdlcheck.worlds.simulated.scheduling.scheduler import current_rank

__all__ = ["PATCHES"]

_LISTENS = "0A"

_inside: weakref.WeakKeyDictionary[PrefixStore, Store] = weakref.WeakKeyDictionary()


def _made_by(real: Any, ours: Callable[..., Store]) -> Callable[[Any], Any]:
    def exchange(new: Any) -> Any:
        def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
            me = current_rank()
            if me is None or cls is not real or (real is TCPStore and _is_of_others(*args, **kwargs)):
                return new(cls)
            return ours(me, *args, **kwargs)  # not an instance of the class, so Python does not call __init__

        return staticmethod(make)

    return exchange


def _is_of_others(
    host_name: str = "", port: int = 0, world_size: Any = None, is_master: bool = False, *_: Any, **__: Any
) -> bool:
    """Return whether this is a client of a server that the controller, or a thread of its own, has in this process."""
    return not is_master and not is_served(port) and _listens_at(port)


def _listens_at(port: int) -> bool:
    """Return whether this process has a socket that listens at the port; False on a system without ``/proc``."""
    sockets = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError), open(table) as lines:
            for _, address, _, state, *_, inode in (line.split()[:10] for line in lines):
                if state == _LISTENS and int(address.rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{inode}]")
    if not sockets:
        return False
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") in sockets:
                return True
    return False


def _kept(new: Any) -> Any:
    """Return a ``__new__`` that keeps the inner store of a ``PrefixStore``; C++ holds only its own half of it."""

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = new(cls)
        inside = args[1] if len(args) > 1 else kwargs.get("store")
        if isinstance(inside, Store) and current_rank() is not None:
            _inside[made] = inside
        return made

    return staticmethod(make)


_WHY = "torch's stores wait in C++ for what no other rank gets a turn to do"
PATCHES = (  # subclasses of torch's stores, and threads that are not ranks, get torch's own
    Patch(TCPStore, "__new__", _made_by(TCPStore, tcp_store), _WHY),
    Patch(FileStore, "__new__", _made_by(FileStore, file_store), _WHY),
    Patch(PrefixStore, "__new__", _kept, _WHY),
)
