"""What torch's stores are in a simulated rank: stores of its network.

torch's own wait in C++ for what no other rank gets a turn to do. The classes stay torch's, also for those who have
imported them by name; ``isinstance`` takes what they make in a rank for one of theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from pdlcheck.worlds.simulated.c10d.own_stores import file_store, is_served, tcp_store
from pdlcheck.worlds.simulated.turns.scheduler import current_rank

__all__ = ["simulate_stores"]

_others: weakref.WeakKeyDictionary[TCPStore, set[int]] = weakref.WeakKeyDictionary()  # ports of other threads' servers
_inside: weakref.WeakKeyDictionary[PrefixStore, Store] = weakref.WeakKeyDictionary()


def simulate_stores() -> None:
    """From now on simulated ranks get such stores; other threads, and classes derived from torch's, get torch's own."""
    make: dict[Any, Callable[..., Store]] = {TCPStore: tcp_store, FileStore: file_store}
    for real, ours in make.items():
        _made_by(real, ours)
    _noted(TCPStore)
    _kept(PrefixStore)


def _made_by(real: Any, ours: Callable[..., Store]) -> None:
    new = real.__new__

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        me = current_rank()
        if me is None or cls is not real or (real is TCPStore and _is_of_others(*args, **kwargs)):
            return new(cls)
        return ours(me, *args, **kwargs)  # no instance of the class: Python does not initialise it once more

    real.__new__ = staticmethod(make)


def _is_of_others(
    host_name: str = "", port: int = 0, world_size: Any = None, is_master: bool = False, *_: Any, **__: Any
) -> bool:
    """Is this a client of a server that the controller, or a thread of its own, has in this process?"""
    return not is_master and not is_served(port) and any(port in ports for ports in list(_others.values()))


def _noted(real: Any) -> None:
    """Remember the ports of torch's own servers in this process, also while they wait for their clients."""
    init = real.__init__

    @wraps(init)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        named = dict(zip(("host_name", "port", "world_size", "is_master"), args, strict=False)) | kwargs
        if not named.get("is_master"):
            init(self, *args, **kwargs)
            return
        ports = _others.setdefault(self, {named.get("port", 0)} - {0})
        init(self, *args, **kwargs)
        ports.add(self.port)

    real.__init__ = initialise


def _kept(real: Any) -> None:
    """A ``PrefixStore`` keeps the store inside, of which C++ keeps its own half alone."""
    new = real.__new__

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = new(cls)
        inside = args[1] if len(args) > 1 else kwargs.get("store")
        if isinstance(inside, Store) and current_rank() is not None:
            _inside[made] = inside
        return made

    real.__new__ = staticmethod(make)
