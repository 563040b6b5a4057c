"""The state that several runs on processes share with one another."""

from __future__ import annotations

from typing import Any

from pdlcheck.worlds.choices import ISOLATIONS

__all__ = ["check_isolation"]


def check_isolation(isolation: Any) -> str:
    """Return ``isolation`` if it is one of the isolation modes; raise otherwise."""
    if isolation not in ISOLATIONS:
        raise ValueError(f"isolation must be one of {', '.join(ISOLATIONS)}; got {isolation!r}")
    return str(isolation)
