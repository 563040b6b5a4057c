"""What Python still holds of ``sys.stdout`` and ``sys.stderr``. Does not import torch."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["flush_streams"]


def flush_streams() -> None:
    """Write it out, whatever stands there: a program may have closed a stream, or put ``None`` in its place."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
