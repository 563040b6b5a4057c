"""The worlds that a session has opened so far. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pdlcheck.worlds import World

__all__ = ["close_worlds", "open_worlds", "worlds_by_name"]

_open: pytest.StashKey[dict[str, World]] = pytest.StashKey()


def worlds_by_name(config: pytest.Config) -> dict[str, World]:
    """Return the session's own dictionary of open worlds."""
    return config.stash.setdefault(_open, {})


def open_worlds(config: pytest.Config) -> list[World]:
    """Return the worlds that tests have used so far."""
    return list(config.stash.get(_open, {}).values())


def close_worlds(config: pytest.Config) -> None:
    """Close the worlds of the session."""
    for world in open_worlds(config):
        world.close()
