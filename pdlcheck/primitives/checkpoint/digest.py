"""The digests of checkpoints: XXH3 with 128 bits, which finds damage at the speed of memory.

``pdlcheck.primitives`` imports this file, so the library is imported when the first digest is made.
"""

from __future__ import annotations

from typing import Protocol

from pdlcheck.extras import extra

__all__ = ["Digest", "new_digest"]


class Digest(Protocol):
    """The part of hashlib's interface that checkpoints use."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add ``data`` to the digest."""

    def hexdigest(self) -> str:
        """Return the digest of all data so far, 32 hexadecimal digits."""


def new_digest(data: bytes = b"") -> Digest:
    """Return a digest that has read ``data``.

    Raises:
        MissingExtra: xxhash is not installed.
    """
    with extra("checkpoint", "a checkpoint"):
        from xxhash import xxh3_128
    return xxh3_128(data)
