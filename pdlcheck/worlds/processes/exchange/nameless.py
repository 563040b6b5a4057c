"""Files without a name: they end with the last process that has them open, whatever happens to it."""

from __future__ import annotations

import os
import tempfile

__all__ = ["nameless_file"]


def nameless_file(what: str) -> int:
    """Make one, and return its descriptor; ``what`` is for those who look into ``/proc``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(what)
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())
