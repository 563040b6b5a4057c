"""Looks after operations for which a rank may wait where nobody sees it: in C++, inside a backward pass."""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter, sleep
from typing import Protocol

__all__ = ["Remembered", "Reminders"]

_AFTER_S = 0.05  # most are under way on all ranks by then


class Remembered(Protocol):
    """Such an operation."""

    def remind(self) -> None:
        """Go on, unless that has happened; called in another thread."""


class Reminders:
    """Reminds each operation once, after a while, in a thread of its own."""

    def __init__(self) -> None:
        self._due: deque[tuple[float, Remembered]] = deque()
        self._some = threading.Event()

    def start(self) -> None:
        """Start the thread, before any test does: a conftest may look for threads that a test has left."""
        threading.Thread(target=self._run, name="pdlcheck reminders", daemon=True).start()

    def add(self, operation: Remembered) -> None:
        """Remind it in a while."""
        self._due.append((perf_counter() + _AFTER_S, operation))
        self._some.set()

    def clear(self) -> None:
        """Forget all: they have ended."""
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
