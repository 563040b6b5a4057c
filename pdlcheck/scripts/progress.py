"""The line that shows, on a terminal, how far the program is; and the output above it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

__all__ = ["Progress"]


class Progress:
    """The progress of the ranks, as one line below what they print.

    Attributes:
        schedule: the number of the schedule that runs.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._began = time.monotonic()
        self._of_rank: dict[int, tuple[int, int]] = {}
        self.schedule = 0

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        """Show the line during the block, if stderr is a terminal."""
        if not self._console.is_terminal:
            yield self
            return
        with self._console.status("starting the ranks") as self._status:
            yield self
        self._status = None

    def tell(self, rank: int, steps: int, operations: int) -> None:
        """Show how far a rank is."""
        if self._status is None:
            return
        self._of_rank[rank] = steps, operations
        steps = max(steps for steps, _ in self._of_rank.values())
        operations = max(operations for _, operations in self._of_rank.values())
        schedule = f"schedule {self.schedule}, " if self.schedule else ""
        seconds = time.monotonic() - self._began
        self._status.update(f"{schedule}step {steps}, {operations} operations, {seconds:.0f} s")

    def write(self, stream: str, line: str) -> None:
        """Write a line of a rank to ``out`` or ``err``."""
        to = sys.__stdout__ if stream == "out" else sys.__stderr__
        if self._status is not None:
            self._console.print(Text(line), end="", soft_wrap=True)
        elif to is not None:
            to.write(line)
            to.flush()
