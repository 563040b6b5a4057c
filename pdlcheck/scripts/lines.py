"""The output of ranks, line by line, each with its rank before it."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["Lines", "own_lines"]


class Lines:
    """Text of several ranks and streams, written in whole lines: ``[rank 1] epoch 0 loss 0.7``.

    Args:
        write: writes a line to one of the streams, ``out`` or ``err``.
    """

    def __init__(self, write: Callable[[str, str], object]) -> None:
        self._write = write
        self._rest: dict[tuple[int, str], str] = {}
        self._lock = threading.Lock()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add text of a rank; its last line is kept until it is complete."""
        if not text:
            return
        with self._lock:
            *lines, rest = (self._rest.pop((rank, stream), "") + text).split("\n")
            if rest:
                self._rest[rank, stream] = rest.rpartition("\r")[2] or rest
            for line in lines:
                self._line(rank, stream, line)

    def end(self) -> None:
        """Write the lines that are not complete."""
        for (rank, stream), rest in self._rest.items():
            self._line(rank, stream, rest)
        self._rest.clear()

    def _line(self, rank: int, stream: str, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]  # a progress bar overwrites its line
        self._write(stream, f"[rank {rank}] {shown}\n")


class _RankStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a simulated rank."""

    def __init__(self, lines: Lines, rank: int, name: str, real: TextIO) -> None:
        self._lines, self._rank, self._name, self._real = lines, rank, name, real
        self.buffer = _RankBytes(self)

    encoding = "utf-8"
    errors = "replace"

    def write(self, text: str, /) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._lines.add(self._rank, self._name, text)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._real.fileno()

    def reconfigure(self, **_: Any) -> None:
        """Accept the settings of a text stream; lines are written at once anyway."""


class _RankBytes(io.BufferedIOBase):
    def __init__(self, text: _RankStream) -> None:
        self._text = text

    def write(self, data: Any, /) -> int:
        self._text.write(bytes(data).decode(errors="replace"))
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._text.fileno()


@contextmanager
def own_lines(lines: Lines, rank: int) -> Iterator[None]:
    """Write what the calling simulated rank prints to ``lines``."""
    before = sys.stdout, sys.stderr
    sys.stdout = _RankStream(lines, rank, "out", before[0])
    sys.stderr = _RankStream(lines, rank, "err", before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
