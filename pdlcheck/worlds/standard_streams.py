"""The text that Python still buffers for ``sys.stdout`` and ``sys.stderr``.

This module does not import torch.
"""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["flush_streams"]


def flush_streams() -> None:
    """Flush both streams, and ignore errors: a program may have closed a stream or replaced it by ``None``."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
