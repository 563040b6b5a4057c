"""Decompression of zstd. This is the one file that imports a library for it."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from pdlcheck.extras import extra

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor as new_decompressor  # noqa: N813 - elsewhere it is a function
    from compression.zstd import ZstdError
else:
    with extra("zstd", "reading a file packed by zstd"):
        from zstandard import ZstdDecompressor, ZstdError

    def new_decompressor() -> Any:
        """Return an object that decompresses one frame."""
        return ZstdDecompressor().decompressobj()


__all__ = ["ZstdStream"]

PACKED_NBYTES = 1 << 11  # they decompress to at most 64 MB: a block of 128 KB takes four bytes at least


class _Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


class ZstdStream:
    """The decompressed bytes of all frames of a stream. A frame without its end raises EOFError."""

    def __init__(self, raw: _Readable) -> None:
        self._raw = raw
        self._frame: Any = None
        self._packed = self._ready = b""

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next ``nbytes``, or fewer at the end; all remaining bytes by default."""
        pieces, there = [self._ready], len(self._ready)
        while nbytes < 0 or there < nbytes:
            piece = self._next()
            if piece is None:
                break
            pieces.append(piece)
            there += len(piece)
        everything = b"".join(pieces)
        cut = len(everything) if nbytes < 0 else nbytes
        self._ready = everything[cut:]
        return everything[:cut]

    def _next(self) -> bytes | None:
        """Return the next decompressed bytes, perhaps none; ``None`` at the end."""
        packed = self._packed or self._raw.read(PACKED_NBYTES)
        self._packed = b""
        if not packed:
            if self._frame is not None:
                raise EOFError("the last frame has no end")
            return None
        if self._frame is None:
            self._frame = new_decompressor()
        try:
            piece: bytes = self._frame.decompress(packed)
        except ZstdError as error:
            raise EOFError(str(error)) from error
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return piece
