"""A rank's third stream besides stdout and stderr: notes of the rank's software for the controller's software.

It is a file that the controller holds, like stdout and stderr. So the notes of a rank that hangs or dies are not lost.
"""

from __future__ import annotations

import json
import os
from typing import Any

__all__ = ["note", "notes", "open_journal"]

_fd: int | None = None


def open_journal(fd: int) -> None:
    """Write this rank's notes to the descriptor; called when the rank starts."""
    global _fd
    _fd = fd


def note(kind: str, value: Any) -> None:
    """Leave a note for the controller; do nothing outside a rank. A value that JSON lacks becomes its ``str``."""
    if _fd is not None:
        try:
            text = json.dumps([kind, value], default=str)
        except (TypeError, ValueError):  # keys that are tuples, a list that holds itself
            text = json.dumps([kind, [*map(str, value)] if isinstance(value, list | tuple) else str(value)])
        os.write(_fd, text.encode() + b"\n")


def notes(journal: str) -> list[tuple[str, Any]]:
    """Return the notes in a journal, in the order in which they were written."""
    found = []
    for line in journal.splitlines():
        try:
            kind, value = json.loads(line)
        except (RecursionError, TypeError, ValueError):  # the rank was killed while it wrote, or something else wrote
            continue
        if isinstance(kind, str):
            found.append((kind, value))
    return found
