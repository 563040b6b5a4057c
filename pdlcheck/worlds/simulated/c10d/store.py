"""A key-value store between simulated ranks whose waits give other ranks their turn."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pdlcheck.worlds.simulated.schedules.access import StoreAccess
from pdlcheck.worlds.simulated.turns.scheduler import Scheduler, current_rank
from pdlcheck.worlds.watch import is_limit

__all__ = ["NO_LIMIT", "SimulatedStore", "as_bytes"]

NO_LIMIT = timedelta(seconds=300)  # torch's default, longer than any test; a program's own is shorter, and everybody's


class SimulatedStore(Store):
    """``torch.distributed.Store`` in memory; a wait that nobody can fulfil is part of a deadlock's report.

    What user code does with it is a switch point. What torch does with it by itself, to make groups, is none: its
    outcome is the same in any order.
    """

    timeout: timedelta  # torch's; its stub leaves it out
    late: type[RuntimeError] = dist.DistStoreError  # what a wait raises whose limit has come

    def __init__(self, scheduler: Scheduler, values: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._made_by = weakref.ref(scheduler)  # whose ranks hold what holds this store
        self._values = {} if values is None else values
        self.set_timeout(NO_LIMIT)

    @property
    def _scheduler(self) -> Scheduler:
        """That of the rank that asks: a fixture may keep a store for longer than its ranks last."""
        me = current_rank()
        if me is not None and me.network is not None:
            return me.network.scheduler  # type: ignore[no-any-return]
        if (made_by := self._made_by()) is None:
            raise RuntimeError("the simulated ranks of this store have ended")
        return made_by

    def clear(self) -> None:
        """Forget everything; not while ranks run."""
        self._values.clear()
        self.set_timeout(NO_LIMIT)

    def set(self, key: str, value: str | bytes) -> None:
        self._access(True, key)
        self._values[key] = as_bytes(value)
        self._scheduler.progress()

    def get(self, key: str) -> bytes:
        self._access(False, key)
        self._wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        self._access(True, key)
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        self._scheduler.progress()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        self._scheduler.poll(f"store.check of {', '.join(map(repr, keys))}", StoreAccess(tuple(keys), False))
        return self._has(keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        self._access(True, key)
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
            self._scheduler.progress()
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        self._access(True, key)
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        self._scheduler.poll("store.num_keys", StoreAccess((), False))
        return len(self._values)

    deleteKey, getNumKeys = delete_key, num_keys  # what a PrefixStore around this one calls

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        self._access(False, *keys)
        self._wait(keys, timeout if is_limit(timeout) and not _is_torch(sys._getframe(1)) else None)

    def _wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        missing = ", ".join(repr(key) for key in keys if not self._has([key]))
        waits_for, access = f"store.wait for {missing}", StoreAccess(tuple(keys), False)
        me = current_rank()
        if limit is None and self.timeout < NO_LIMIT and not _is_torch(sys._getframe(2)):
            limit = self.timeout
        ready = partial(self._has, keys)
        if limit is None or me is None:
            self._scheduler.wait_until(ready, waits_for, access)
        elif not me.network.wait_in_store(ready, waits_for, access, limit.total_seconds()):
            raise self.late(f"wait timeout after {round(1000 * limit.total_seconds())}ms, keys: {missing}")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _access(self, writes: bool, *keys: str) -> None:
        if current_rank() is not None and not _is_torch(sys._getframe(2)):
            self._scheduler.switch(StoreAccess(keys, writes))


def as_bytes(value: str | bytes) -> bytes:
    """What torch makes of a value."""
    if not isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a store keeps str and bytes, got {type(value).__name__}")
    return value.encode() if isinstance(value, str) else bytes(value)


def _is_torch(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__", "")).startswith("torch.")
