"""The exit codes of the command ``pdlcheck``."""

from __future__ import annotations

__all__ = ["FAILED", "HELD", "INTERRUPTED", "USAGE"]

HELD, FAILED, USAGE = 0, 1, 2
INTERRUPTED = 130  # the exit code of a shell: 128 + SIGINT
