"""Unnamed files: they end with the last process that has them open, even if that process is killed."""

from __future__ import annotations

import os
import tempfile

__all__ = ["anonymous_file"]


def anonymous_file(what: str) -> int:
    """Make an unnamed file and return its descriptor; ``/proc`` shows it under the label ``what``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(what)
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())
