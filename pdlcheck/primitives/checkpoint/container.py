"""The bytes of a checkpoint file: three header lines that describe the content, and the body.

The header lines are text, so that ``head -3`` shows them. The body is a sequence of blocks of bytes: the length of
each, then the tree, then the content of each tensor. So neither writing nor reading needs memory for a second copy.
Nothing is unpickled before the digest of the body has been compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdlcheck.primitives.checkpoint.digest import Digest, new_digest

__all__ = ["FOREIGN", "FORMAT", "Refused", "framed", "pack", "read", "verify", "whole", "write"]

FORMAT = 2
FOREIGN = "is intact, but not a checkpoint of save_checkpoint"
_FIRST = b"pdlcheck checkpoint, format "
_VERSION = re.compile(_FIRST + rb"(\d+)\n")
_HEADER = re.compile(_FIRST + rb"%d\nxxh3_128 ([0-9a-f]{32})\nnbytes (\d{20})\n" % FORMAT)
_HEADER_NBYTES = len(_FIRST + b"%d\nxxh3_128 %032d\nnbytes %020d\n" % (FORMAT, 0, 0))
_PARTS = {"step", "world_size", "about", "ranks", "tensors"}
_MORE = {"others"}  # present if ranks hold different objects
_LENGTH = np.dtype("<u8")
_CHUNK = 2**20  # bytes that stay in a core's cache between being read and being digested

Block = bytes | memoryview


class Refused(Exception):
    """The problem of a file, in words that follow its name."""


def pack(payload: dict[str, Any]) -> list[Block]:
    """Return the body for a payload whose tensors are on the CPU. Tensor contents are read when the body is written."""
    tensors: dict[str, Tensor] = payload["tensors"]
    forms = [(name, _name(t.dtype), tuple(t.shape), t.stride(), t.storage_offset()) for name, t in tensors.items()]
    tree = io.BytesIO()
    torch.save({**payload, "tensors": forms}, tree)
    return framed([tree.getvalue(), *(_storage(tensor).numpy().data for tensor in tensors.values())])


def framed(blocks: Sequence[Block]) -> list[Block]:
    """Return the body of ``blocks``: their lengths, and the blocks themselves."""
    return [np.array([len(blocks), *map(len, blocks)], dtype=_LENGTH).tobytes(), *blocks]


def write(descriptor: int, body: Sequence[Block]) -> None:
    """Write the body, then the header lines before it.

    The digest covers the written bytes, even if another thread changes a tensor meanwhile.
    """
    chunk, digest = memoryview(bytearray(_CHUNK)), new_digest()
    os.lseek(descriptor, _HEADER_NBYTES, os.SEEK_SET)
    for block in body:
        view = memoryview(block)
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            copy = chunk[: len(part)]
            copy[:] = part
            digest.update(copy)
            _put(descriptor, copy)
    os.lseek(descriptor, 0, os.SEEK_SET)
    nbytes = sum(map(len, body))
    _put(descriptor, b"%s%d\nxxh3_128 %s\nnbytes %020d\n" % (_FIRST, FORMAT, digest.hexdigest().encode(), nbytes))


def verify(path: Path) -> str:
    """Return the digest of an intact file.

    Raises:
        Refused: the file cannot be read, was cut, is longer than its header states, or has a changed bit.
    """
    with _opened(path) as file:
        nbytes, digest = _first_lines(file)
        _require_digest(file, nbytes, digest)
        return digest


def whole(path: Path) -> bool:
    """Return whether a file has the length that its header states. The body is not read, so this is cheap."""
    try:
        with _opened(path) as file:
            _first_lines(file)
            return True
    except Refused:
        return False


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the digest and the payload of an intact file. Raise ``Refused`` for any other file."""
    with _opened(path) as file:
        nbytes, digest = _first_lines(file)
        blocks = _blocks(file, nbytes, digest)
    try:
        tree, *held = blocks
        with warnings.catch_warnings():  # torch 2.14 warns about sparse tensors unpickled earlier in this process
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            payload = torch.load(io.BytesIO(tree.numpy().data), map_location="cpu", weights_only=True)
    except Exception as error:  # any error means that pdlcheck did not write this body
        raise Refused(f"holds something that weights_only=True does not load: {error}") from None
    if not isinstance(payload, dict) or set(payload) - _MORE != _PARTS:
        raise Refused(FOREIGN)
    try:
        payload["tensors"] = dict(_tensor(form, block) for form, block in zip(payload["tensors"], held, strict=True))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise Refused(FOREIGN) from None
    return digest, payload


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[io.FileIO]:
    try:
        with open(path, "rb", buffering=0, opener=_open) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Refused("is no regular file")
            yield file
    except FileNotFoundError:
        raise Refused("does not exist") from None
    except IsADirectoryError:
        raise Refused("is a folder: pass a file of it, such as latest_checkpoint gives") from None
    except OSError as error:
        raise Refused(f"cannot be read: {error.strerror or error}") from None


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # does not wait for a writer if the path is a FIFO


def _first_lines(file: io.FileIO) -> tuple[int, str]:
    """Return the length of the body and its digest; raise ``Refused`` unless header and length are as written."""
    content = file.read(_HEADER_NBYTES)
    version, match = _VERSION.match(content), _HEADER.match(content)
    if version is not None and version[1] != str(FORMAT).encode():
        raise Refused(f"was written in format {version[1].decode()}, this version of pdlcheck reads format {FORMAT}")
    if match is None:
        if len(content) < _HEADER_NBYTES and content[: len(_FIRST)] == _FIRST[: len(content)]:
            raise Refused(f"was cut at byte {len(content)}, inside its first lines" if content else "is empty")
        if content.startswith(_FIRST):
            raise Refused("has damaged first lines, which should say format, xxh3_128 and nbytes")
        raise Refused(f"is not a checkpoint: it does not start with {_FIRST.decode().strip()!r}")
    whole, found = _HEADER_NBYTES + int(match[2]), os.fstat(file.fileno()).st_size
    if found < whole:
        raise Refused(f"was cut at byte {found}: it should be {whole} bytes long")
    if found > whole:
        raise Refused(f"is {found - whole} bytes longer than the {whole} that were written")
    return int(match[2]), match[1].decode()


def _blocks(file: io.FileIO, nbytes: int, digest: str) -> list[Tensor]:
    """Return the body's blocks as bytes, each in separate memory, if their digest is the written one."""
    actual = new_digest()
    (count,) = _lengths(file, 1, actual) if nbytes >= _LENGTH.itemsize else [0]
    room = nbytes // _LENGTH.itemsize - 1
    lengths = _lengths(file, count, actual) if count <= room else []
    if not lengths or sum(lengths) + _LENGTH.itemsize * (1 + count) != nbytes:  # damaged, or written by another program
        file.seek(_HEADER_NBYTES)
        _require_digest(file, nbytes, digest)
        raise Refused(FOREIGN)
    blocks = [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]
    for block in blocks:
        view = block.numpy().data
        for start in range(0, len(view), _CHUNK):
            _fill(file, view[start : start + _CHUNK], actual)
    _require_same(actual, digest)
    return blocks


def _require_digest(file: io.FileIO, nbytes: int, digest: str) -> None:
    chunk, actual = memoryview(bytearray(min(_CHUNK, nbytes))), new_digest()
    for start in range(0, nbytes, _CHUNK):
        _fill(file, chunk[: nbytes - start], actual)
    _require_same(actual, digest)


def _require_same(actual: Digest, digest: str) -> None:
    found = actual.hexdigest()
    if found != digest:
        raise Refused(f"was changed after it was written: its XXH3-128 is {found[:12]}..., not {digest[:12]}...")


def _put(descriptor: int, content: Block) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _lengths(file: io.FileIO, count: int, digest: Digest) -> list[int]:
    found = np.empty(count, dtype=_LENGTH)
    _fill(file, found.view(np.uint8).data, digest)
    return [int(length) for length in found]


def _fill(file: io.FileIO, view: memoryview, digest: Digest) -> None:
    """Read the next bytes of the file into ``view`` and ``digest``."""
    rest = view
    while rest:
        taken = file.readinto(rest)
        if not taken:
            raise Refused("was cut while it was read")
        rest = rest[taken:]
    digest.update(view)


def _storage(tensor: Tensor) -> Tensor:
    """Return the whole content of a tensor's storage, as bytes in memory order."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _tensor(form: tuple[Any, ...], block: Tensor) -> tuple[str, Tensor]:
    name, dtype, shape, stride, offset = form
    empty = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
    return name, empty.set_(block.untyped_storage(), offset, shape, stride)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
