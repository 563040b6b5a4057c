"""Checks of the files that commands write."""

from __future__ import annotations

from pathlib import Path

__all__ = ["why_not_writable"]


def why_not_writable(path: Path) -> str:
    """Return the reason why a file cannot be written; empty if it can. The file stays as it was."""
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
