"""A key-value store between simulated ranks. A rank that waits in it gives other ranks their turn."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from pdlcheck.worlds.observe import is_limit
from pdlcheck.worlds.simulated.schedules.access import StoreAccess
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, Scheduler, current_rank

__all__ = ["NO_LIMIT", "SimulatedStore", "as_bytes", "wait_in_store"]

# torch's default, longer than any test: it counts as no limit. A shorter limit that a program sets holds for all ranks.
NO_LIMIT = timedelta(seconds=300)


class SimulatedStore(Store):
    """A ``torch.distributed.Store`` in memory. The report of a deadlock includes waits that no rank can fulfil.

    Calls of user code are switch points. The calls by which torch makes groups are not, because their results are the
    same in any order.
    """

    timeout: timedelta  # an attribute of torch's class that its stub leaves out
    late: type[RuntimeError] = dist.DistStoreError  # raised by a wait whose limit has elapsed

    def __init__(self, scheduler: Scheduler, values: dict[str, bytes] | None = None) -> None:
        super().__init__()
        self._made_by = weakref.ref(scheduler)  # weak: its ranks hold objects that hold this store
        self._values = {} if values is None else values
        self.set_timeout(NO_LIMIT)

    @property
    def _scheduler(self) -> Scheduler:
        """Return the scheduler of the calling rank: a fixture may keep a store longer than the ranks that made it."""
        me = current_rank()
        if me is not None and me.engine is not None:
            return me.engine.scheduler  # type: ignore[no-any-return]
        if (made_by := self._made_by()) is None:
            raise RuntimeError("the simulated ranks of this store have ended")
        return made_by

    def clear(self) -> None:
        """Remove all values and restore the default limit. Must not be called while ranks run."""
        self._values.clear()
        self.set_timeout(NO_LIMIT)

    def set(self, key: str, value: str | bytes) -> None:
        """Store ``value`` under ``key``."""
        self._access(True, key)
        self._values[key] = as_bytes(value)
        self._scheduler.progress()

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return it."""
        self._access(False, key)
        self._wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add ``value`` to the number under ``key``, which is 0 at first, and return the sum."""
        self._access(True, key)
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        self._scheduler.progress()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        self._scheduler.poll(f"store.check of {', '.join(map(repr, keys))}", StoreAccess(tuple(keys), False))
        return self._has(keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Store ``desired_value`` if ``key`` has ``expected_value``, and return the value of ``key`` afterwards.

        A key without a value counts as empty. If it stays empty, ``expected_value`` is returned.
        """
        self._access(True, key)
        expected, desired = as_bytes(expected_value), as_bytes(desired_value)
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
            self._scheduler.progress()
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        """Remove ``key``, and return whether it had a value."""
        self._access(True, key)
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        self._scheduler.poll("store.num_keys", StoreAccess((), False))
        return len(self._values)

    deleteKey, getNumKeys = delete_key, num_keys  # the names that a PrefixStore around this one calls

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """Wait until all keys have values.

        ``timeout`` counts only in calls of user code.

        Raises:
            DistStoreError: the limit has elapsed (``RuntimeError`` in a ``FileStore``).
        """
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
        elif not wait_in_store(me, ready, waits_for, access, limit.total_seconds()):
            raise self.late(f"wait timeout after {round(1000 * limit.total_seconds())}ms, keys: {missing}")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _access(self, writes: bool, *keys: str) -> None:
        if current_rank() is not None and not _is_torch(sys._getframe(2)):
            self._scheduler.switch(StoreAccess(keys, writes))


def as_bytes(value: str | bytes) -> bytes:
    """Return the bytes that torch stores for a value.

    Raises:
        TypeError: the value is neither str nor bytes.
    """
    if not isinstance(value, str | bytes | bytearray):
        raise TypeError(f"a store keeps str and bytes, got {type(value).__name__}")
    return value.encode() if isinstance(value, str) else bytes(value)


def wait_in_store(
    me: RankThread, ready: Callable[[], bool], waits_for: str, access: StoreAccess, limit_s: float
) -> bool:
    """Block the running rank until ``ready()`` returns True; return False if ``limit_s`` elapses before.

    A limit elapses only when no other rank can go on, and the shortest of several limits elapses.
    """
    elapsed: list[bool] = []
    scheduler: Scheduler = me.engine.scheduler
    with scheduler.timers.limit(limit_s, me.rank, lambda: elapsed.append(True)):
        scheduler.wait_until(lambda: bool(elapsed) or ready(), waits_for, access)
    return ready()


def _is_torch(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__", "")).startswith("torch.")
