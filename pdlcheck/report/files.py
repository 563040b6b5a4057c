"""Files that commands write."""

from __future__ import annotations

from pathlib import Path

__all__ = ["why_not_writable"]


def why_not_writable(path: Path) -> str:
    """Return why a file cannot be written; nothing if it can. The file is left as it was."""
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
