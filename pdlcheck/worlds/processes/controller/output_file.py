"""An unnamed file that a rank writes to; of too much output, only the beginning and the end are kept."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import os
import sys

from pdlcheck.worlds.processes.exchange.anonymous_file import anonymous_file

__all__ = ["OutputFile"]

_MOST = 4 << 20  # bytes of output that are read in full
_END = 1 << 19  # bytes that are kept of each end of longer output
_KEPT = 1 << 20  # bytes of output that was read and may still take room
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class OutputFile:
    """The file for stdout, stderr or the journal of a rank; reading does not disturb the rank that writes.

    Args:
        is_whole: True if no output may be left out.
    """

    def __init__(self, *, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self.fd = anonymous_file("pdlcheck output")
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_APPEND)
        self._read = 0  # end of the output that was read
        self._freed = 0  # end of the output whose room was freed
        self._first = ""  # the beginning of too much output
        self._left_out = 0  # bytes left out after it
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self) -> str:
        """Return the text written since the last call."""
        size = os.fstat(self.fd).st_size
        if size == self._read and not self._left_out:
            return ""
        self._bound(size)
        text = self._next(size)
        if self._left_out:
            note = f"\n... {self._left_out} bytes of output are left out ...\n"
            text, self._first, self._left_out = self._first + note + text, "", 0
        self._free()
        return text

    def bound(self) -> None:
        """Keep the two ends of output that is too long, and free the room of the part between them."""
        self._bound(os.fstat(self.fd).st_size)

    def _bound(self, size: int) -> None:
        if self._is_whole:
            return
        if size - self._read > _MOST or (self._left_out and size - self._read > 2 * _END):
            if not self._left_out:
                self._first = self._next(self._read + _END)
            self._left_out += size - _END - self._read
            self._read = size - _END
            self._decoder.reset()
            self._free()

    def rewind(self) -> None:
        """Free the memory of output that was read, while the rank is idle."""
        if self._read > _KEPT and os.fstat(self.fd).st_size == self._read:
            os.ftruncate(self.fd, 0)
            self._read = self._freed = 0

    def _next(self, end: int) -> str:
        if end <= self._read:
            return ""
        data = os.pread(self.fd, end - self._read, self._read)
        self._read += len(data)
        return self._decoder.decode(data)

    def _free(self) -> None:
        if self._read - self._freed > _KEPT and sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):  # the system does not support it
                _punch_hole(self.fd, self._freed, self._read - self._freed)
            self._freed = self._read


def _punch_hole(fd: int, start: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    offsets = ctypes.c_longlong(start), ctypes.c_longlong(length)
    if libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *offsets) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")
