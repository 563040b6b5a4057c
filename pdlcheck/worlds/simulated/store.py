"""A key-value store between simulated ranks whose waits give other ranks their turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from pdlcheck.worlds.simulated.scheduler import Scheduler

__all__ = ["SimulatedStore"]


class SimulatedStore(Store):
    """``torch.distributed.Store`` in memory; a wait that nobody can fulfil is part of a deadlock's report."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._scheduler.progress()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        self._scheduler.progress()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        self._scheduler.poll(f"store.check of {', '.join(map(repr, keys))}")
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        desired = desired_value.encode() if isinstance(desired_value, str) else bytes(desired_value)
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
            self._scheduler.progress()
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    deleteKey, getNumKeys = delete_key, num_keys  # what a PrefixStore around this one calls

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        missing = ", ".join(repr(key) for key in keys if key not in self._values)
        self._scheduler.wait_until(
            lambda: all(key in self._values for key in keys), f"store.wait for {missing}"
        )
