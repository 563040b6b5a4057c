"""A key-value store between simulated ranks whose waits give other ranks their turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from pdlcheck.worlds.simulated.scheduler import Scheduler, current_rank
from pdlcheck.worlds.simulated.schedules.access import StoreAccess

__all__ = ["SimulatedStore"]


class SimulatedStore(Store):
    """``torch.distributed.Store`` in memory; a wait that nobody can fulfil is part of a deadlock's report.

    What user code does with it is a switch point. What torch does with it by itself, to make groups, is none: its
    outcome is the same in any order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}

    def clear(self) -> None:
        """Forget everything; not while ranks run."""
        self._values.clear()

    def set(self, key: str, value: str | bytes) -> None:
        self._access(True, key)
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
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
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        self._access(True, key)
        expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        desired = desired_value.encode() if isinstance(desired_value, str) else bytes(desired_value)
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
        self._wait(keys)

    def _wait(self, keys: Sequence[str]) -> None:
        missing = ", ".join(repr(key) for key in keys if key not in self._values)
        self._scheduler.wait_until(
            lambda: all(key in self._values for key in keys),
            f"store.wait for {missing}",
            StoreAccess(tuple(keys), False),
        )

    def _access(self, writes: bool, *keys: str) -> None:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if current_rank() is not None and not caller.startswith("torch."):
            self._scheduler.switch(StoreAccess(keys, writes))
