"""The switch of the fast paths."""

from __future__ import annotations

import pytest

__all__ = ["is_plain"]


def is_plain(config: pytest.Config) -> bool:
    """Return whether all fast paths are switched off in a session."""
    return bool(config.getoption("--pdl-plain"))
