"""Reminders of operations for which a rank may wait undetected: in C++, inside a backward pass."""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter, sleep
from typing import Protocol

from pdlcheck.time_budgets import REMINDER_S

__all__ = ["Remembered", "Reminders"]


class Remembered(Protocol):
    """An operation that may need a reminder."""

    def remind(self) -> None:
        """Make the operation go on, unless it has done so; called in another thread."""


class Reminders:
    """A thread that reminds each operation once, after a while."""

    def __init__(self) -> None:
        self._due: deque[tuple[float, Remembered]] = deque()
        self._some = threading.Event()

    def start(self) -> None:
        """Start the thread, before any test does: a conftest may look for threads that a test has left."""
        threading.Thread(target=self._run, name="pdlcheck reminders", daemon=True).start()

    def add(self, operation: Remembered) -> None:
        """Remind ``operation`` after a while."""
        self._due.append((perf_counter() + REMINDER_S, operation))
        self._some.set()

    def clear(self) -> None:
        """Forget all operations, because they have ended."""
        self._due.clear()

    def _run(self) -> None:
        while True:
            self._some.wait()
            self._some.clear()
            while self._due:
                try:
                    due, operation = self._due.popleft()
                except IndexError:  # cleared meanwhile
                    break
                sleep(max(due - perf_counter(), 0.0))
                operation.remind()
