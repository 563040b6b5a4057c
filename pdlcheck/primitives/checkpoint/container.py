"""The bytes of a checkpoint file: three lines that say what follows, and the body.

The lines are text, so that ``head -3`` shows them. Nothing of the body is unpickled before its digest was compared.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import torch

__all__ = ["FORMAT", "Refused", "body_of", "read", "sealed", "verify", "whole"]

FORMAT = 1
_FIRST = b"pdlcheck checkpoint, format "
_VERSION = re.compile(_FIRST + rb"(\d+)\n")
_HEADER = re.compile(_FIRST + rb"%d\nsha256 ([0-9a-f]{64})\nnbytes (\d{20})\n" % FORMAT)
_HEADER_NBYTES = len(_FIRST + b"%d\nsha256 %064d\nnbytes %020d\n" % (FORMAT, 0, 0))
_PARTS = {"step", "world_size", "about", "ranks", "tensors"}
_MORE = {"others"}  # where ranks hold other things


class Refused(Exception):
    """What is wrong with a file, in words that follow its name."""


def sealed(body: bytes | memoryview) -> bytes:
    """The three lines for ``body``."""
    digest = hashlib.sha256(body).hexdigest()
    return b"%s%d\nsha256 %s\nnbytes %020d\n" % (_FIRST, FORMAT, digest.encode(), len(body))


def body_of(payload: dict[str, Any]) -> memoryview:
    """The payload as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getbuffer()


def verify(path: Path) -> tuple[str, bytes]:
    """The digest and the body of an intact file.

    Raises:
        Refused: it cannot be read, was cut, is longer than it says, or one of its bits is not what was written.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_NBYTES)
            body = file.read()
    except FileNotFoundError:
        raise Refused("does not exist") from None
    except IsADirectoryError:
        raise Refused("is a folder: pass a file of it, such as latest_checkpoint gives") from None
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror or error}") from None
    nbytes, digest = _header(header)
    whole, found = _HEADER_NBYTES + nbytes, _HEADER_NBYTES + len(body)
    if found < whole:
        raise Refused(f"was cut at byte {found}: it should be {whole} bytes long")
    if found > whole:
        raise Refused(f"is {found - whole} bytes longer than the {whole} that were written")
    actual = hashlib.sha256(body).hexdigest()
    if actual != digest:
        raise Refused(f"was changed after it was written: its SHA-256 is {actual[:12]}..., not {digest[:12]}...")
    return digest, body


def whole(path: Path) -> bool:
    """Whether a file is as long as it says: a look that does not read the body, so that it costs nothing."""
    try:
        with path.open("rb") as file:
            nbytes, _ = _header(file.read(_HEADER_NBYTES))
        return path.stat().st_size == _HEADER_NBYTES + nbytes
    except (OSError, Refused):
        return False


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """The digest and the payload of an intact file; ``Refused`` says what is wrong with another one."""
    digest, body = verify(path)
    try:
        payload = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the body is, it is not one of ours
        raise Refused(f"holds something that weights_only=True does not load: {error}") from None
    if not isinstance(payload, dict) or set(payload) - _MORE != _PARTS:
        raise Refused("is intact, but not a checkpoint of save_checkpoint")
    return digest, payload


def _header(content: bytes) -> tuple[int, str]:
    """Length of the body and its digest. Strict: no byte may differ from what was written."""
    version, match = _VERSION.match(content), _HEADER.match(content)
    if version is not None and version[1] != str(FORMAT).encode():
        raise Refused(f"was written in format {version[1].decode()}, this version of pdlcheck reads format {FORMAT}")
    if match is None:
        if len(content) < _HEADER_NBYTES and content[: len(_FIRST)] == _FIRST[: len(content)]:
            raise Refused(f"was cut at byte {len(content)}, inside its first lines" if content else "is empty")
        if content.startswith(_FIRST):
            raise Refused("has damaged first lines, which should say format, sha256 and nbytes")
        raise Refused(f"is not a checkpoint: it does not start with {_FIRST.decode().strip()!r}")
    return int(match[2]), match[1].decode()
