"""A file that only this user can read; in it, rank 0 of a launch publishes its address and its key."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

__all__ = ["MeetingFile"]

_PRIVATE = 0o600
_CURE = "pass --pdl-init-method file:///PATH of a new file in a directory of your own"


class MeetingFile:
    """Rank 0's end of the meeting file; it holds the file until :meth:`remove`.

    Args:
        path: the file; content that an ended launch left there is overwritten.
        text: the content for the other ranks.

    Raises:
        PermissionError: the file belongs to another user, or other users can read or write it.
        FileExistsError: another launch uses the file.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._file = _locked(path)
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, text.encode())
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Delete the file; a second call does nothing."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # the file or its directory no longer exists
                if _is_at(self._path, self._file):
                    self._path.unlink()
            os.close(self._file)
            self._file = -1

    @staticmethod
    def read(path: Path) -> str:
        """Return the text that rank 0 has written; it may be incomplete while rank 0 writes.

        Raises:
            FileNotFoundError: rank 0 has not written the file yet.
            PermissionError: other users may have written the file.
        """
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, encoding="utf-8", errors="replace") as lines:
            _require_own(path, file)
            return lines.read(10_000)


def _locked(path: Path) -> int:
    """Open the file and lock it for as long as this process lives or keeps it open."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _PRIVATE)
        try:
            _require_own(path, file)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
        except BlockingIOError:
            os.close(file)
            why = f"the processes of another launch meet at {path}: wait for its end, or {_CURE}"
            raise FileExistsError(why) from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # another launch has ended meanwhile and deleted the file


def _is_at(path: Path, file: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(file))
    return False


def _require_own(path: Path, file: int) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{path} is no plain file: {_CURE}")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {found.st_uid}, this process to user {os.geteuid()}: {_CURE}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise PermissionError(
            f"others may read or write {path}, which holds the key of the launch (its mode is {mode:04o}): {_CURE}, "
            "where a mode of 0600 is kept"
        )
