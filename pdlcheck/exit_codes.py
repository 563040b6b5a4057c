"""What the command ``pdlcheck`` ends with."""

from __future__ import annotations

__all__ = ["FAILED", "HELD", "INTERRUPTED", "USAGE"]

HELD, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130  # as a shell has it
