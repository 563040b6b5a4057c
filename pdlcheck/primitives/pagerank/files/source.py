"""The decompressed bytes of a file, a pipe or standard input, with a way to look at them before they are read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["Source", "open_source"]

PIECE = 1 << 22  # bytes
BZIP2 = b"1AY&SY"  # after BZh and a digit


class _Counted:
    """A stream of bytes that counts the bytes read and lets the caller look at the next ones."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._ahead = raw, b""
        self.position = 0

    def peek(self, nbytes: int) -> bytes:
        if len(self._ahead) < nbytes:
            self._ahead = self._filled(self._ahead, nbytes)
        return self._ahead[:nbytes]

    def read(self, nbytes: int = -1) -> bytes:
        cut = len(self._ahead) if nbytes < 0 else nbytes
        piece, self._ahead = self._ahead[:cut], self._ahead[cut:]
        piece = self._filled(piece, nbytes)
        self.position += len(piece)
        return piece

    def _filled(self, piece: bytes, nbytes: int) -> bytes:
        """Return ``piece`` and the bytes after it, ``nbytes`` in all.

        A pipe may return fewer bytes per read than requested.
        """
        while nbytes < 0 or len(piece) < nbytes:
            more = self._raw.read(nbytes - len(piece) if nbytes >= 0 else -1)
            if not more:
                break
            piece = piece + more if piece else more
        return piece


class Source:
    """An open source of edges.

    ``name`` is for errors. ``total`` is the length of the file on disk, ``None`` for a pipe. ``path`` is the path of a
    regular, uncompressed file, else ``None``.
    """

    def __init__(self, raw: IO[bytes], name: str, path: Path | None) -> None:
        self.name = name
        status = os.fstat(raw.fileno()) if _has_descriptor(raw) else None
        self.total = status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None
        self._counted = _Counted(raw)
        unpacked = _unpacked(self._counted, name)
        self._stream = _Counted(unpacked)
        self.path = path if self.total is not None and unpacked is self._counted else None

    @property
    def suffix(self) -> str:
        """Return the suffix of the name, without the suffix of a compressed file."""
        name = Path(self.name)
        return (name.with_suffix("") if name.suffix in (".gz", ".bz2", ".xz", ".zst") else name).suffix.lower()

    @property
    def position(self) -> int:
        """Return the number of bytes read so far, of the file as it is on disk."""
        return self._counted.position

    @property
    def share(self) -> float | None:
        """Return the share of the file that has been read; ``None`` if its length is unknown."""
        return None if self.total is None else self.position / max(self.total, 1)

    def peek(self, nbytes: int) -> bytes:
        """Return the first unread bytes without reading them: ``nbytes``, or fewer at the end."""
        with self._unpacking():
            return self._stream.peek(nbytes)

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next ``nbytes``, or fewer at the end; all remaining bytes by default."""
        with self._unpacking():
            return self._stream.read(nbytes)

    @contextmanager
    def seekable(self) -> Iterator[Path | IO[bytes]]:
        """Yield a file that libraries can seek in: the file itself, or a temporary one with all its bytes.

        Raises:
            OSError: there is no room for the temporary file. The length of a compressed file does not show its need of
                room.
        """
        if self.path is not None:
            yield self.path
            return
        with tempfile.TemporaryFile() as file:
            while piece := self.read(PIECE):
                try:
                    file.write(piece)
                    file.flush()
                except OSError as error:
                    raise self._too_long(file.tell(), error) from error
            file.seek(0)
            yield file

    def _too_long(self, nbytes: int, error: OSError) -> OSError:
        where = tempfile.gettempdir()
        what = f"{self.name}: {nbytes} bytes were unpacked into {where}, and then: {error.strerror}"
        return OSError(error.errno, f"{what}; set TMPDIR to a folder on a larger disk")

    @contextmanager
    def _unpacking(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise self.unreadable(error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> ValueError:
        """Return the error for a file that is truncated or damaged."""
        return ValueError(f"{self.name} cannot be unpacked: {error}; it may be truncated, get it again")


def _name_of(stream: IO[bytes]) -> str:
    match getattr(stream, "name", None):
        case "<stdin>" | 0:
            return "standard input"
        case int(descriptor):
            return f"file descriptor {descriptor}"
        case name:
            return str(name or stream)


@contextmanager
def open_source(given: str | os.PathLike[str] | IO[bytes]) -> Iterator[Source]:
    """Open a file by its path, or take a binary stream such as ``sys.stdin.buffer``, which stays open."""
    if not isinstance(given, str | os.PathLike):
        stream: Any = given
        if isinstance(stream, io.TextIOBase) or not hasattr(stream, "read"):
            raise TypeError(f"edges are read from a path or a binary stream, got {given!r}; open it with mode 'rb'")
        yield Source(given, _name_of(given), None)
        return
    path = Path(given)
    with path.open("rb") as raw:
        yield Source(raw, str(path), path)


def _has_descriptor(raw: IO[bytes]) -> bool:
    try:
        raw.fileno()
    except (AttributeError, OSError):
        return False
    return True


def _unpacked(raw: _Counted, name: str) -> Any:
    """Return the stream itself, or a stream that decompresses it, depending on the first bytes."""
    begin = raw.peek(10)
    if begin.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[call-overload]  # GzipFile needs only read
    if begin.startswith(b"BZh") and (begin[4:] == BZIP2 or name.endswith(".bz2")):
        return bz2.BZ2File(raw)  # type: ignore[call-overload]
    if begin.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(raw)  # type: ignore[arg-type]
    if begin.startswith(b"\x28\xb5\x2f\xfd"):
        from pdlcheck.primitives.pagerank.files.zstd import ZstdStream

        return ZstdStream(raw)
    return raw
