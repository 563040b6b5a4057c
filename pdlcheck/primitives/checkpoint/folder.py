"""A folder of checkpoints: their names, atomic addition, and the removal of old ones.

A file gets its final name only when it is completely on the disk. Until then it is a temporary file that its writer
holds locked. The lock ends with the process, even if that is killed. So the next writer can detect abandoned files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdlcheck.primitives.checkpoint.container import Block, Refused, verify, whole, write

__all__ = ["MAX_STEP", "add", "intact", "path_of", "remove_stale", "step_of", "stored", "tidy"]

MAX_STEP = 10**12 - 1  # the largest step that fits into the file name
_NAME = re.compile(r"step_(\d{12})\.ckpt")
_TEMPORARY = re.compile(r"\.step_\d{12}\.ckpt\.[0-9a-f]{8}\.tmp")


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step`` in ``folder``."""
    return folder / f"step_{step:012d}.ckpt"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for other files."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def stored(folder: Path) -> list[Path]:
    """Return every file that has a checkpoint's name, newest step first."""
    names = os.listdir(folder) if folder.is_dir() else []
    paths = [folder / name for name in sorted(names, reverse=True) if _NAME.fullmatch(name)]
    return [path for path in paths if path.is_file()]


def intact(folder: Path, before: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield name and digest of the intact checkpoints, newest first; only those of earlier steps than ``before``.

    Each file is read when its entry is requested, which takes time in proportion to its size.
    """
    limit = None if before is None else step_of(before)
    for path in stored(folder):
        if limit is None or (step_of(path) or 0) < limit:
            with contextlib.suppress(Refused):
                yield path.name, verify(path)


def add(path: Path, body: Sequence[Block]) -> None:
    """Write ``body`` to the file ``path``, on the disk; on an error, leave everything unchanged."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        _sync_folder(path.parent.parent)
    descriptor, temporary = _locked(path)
    try:
        write(descriptor, body)
        os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of writers that have ended."""
    for name in os.listdir(folder) if folder.is_dir() else []:
        if not _TEMPORARY.fullmatch(name):
            continue
        with contextlib.suppress(OSError):  # the file was renamed or removed, or is being written
            descriptor = os.open(folder / name, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
            finally:
                os.close(descriptor)


def tidy(written: Path, keep: int) -> None:
    """Keep the ``keep`` newest whole checkpoints up to ``written``; remove older ones and abandoned temporary files.

    Checkpoints of later steps are not touched. A file that cannot be removed causes only a warning, because the
    checkpoint itself is on the disk.
    """
    remove_stale(written.parent)
    kept = 0
    for path in stored(written.parent):
        if path.name > written.name:
            continue
        if kept < keep:
            kept += whole(path)
        else:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(f"{path} is too old but could not be removed: {error.strerror or error}", stacklevel=2)


def _locked(path: Path) -> tuple[int, Path]:
    """Return a new temporary file beside ``path``, locked by this process."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # without locks on this file system, no writer removes the file as stale
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # otherwise another writer removed it as stale before it was locked
            return descriptor, temporary
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
