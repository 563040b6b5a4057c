"""The error of a trace that cannot be read, or does not fit the other one."""

from __future__ import annotations

__all__ = ["TraceError"]


class TraceError(ValueError):
    """A trace that cannot be read, or that cannot be compared with the other one; the message says what to do."""
