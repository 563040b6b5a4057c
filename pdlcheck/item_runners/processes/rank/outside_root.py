"""Test files outside of pytest's root folder, such as those of ``--pyargs``.

Their node ids begin at the argument of the command line, and a rank that collects a single file does not have it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlcheck.compat.pytest.config import command_line_paths, set_command_line_paths

__all__ = ["keep_node_ids", "paths_outside"]


def paths_outside(config: pytest.Config) -> tuple[str, ...]:
    """Return the paths of the command line if some of them are outside of the root folder; otherwise return nothing."""
    session = config.pluginmanager.getplugin("session")
    paths = command_line_paths(session)
    if all(path.is_relative_to(config.rootpath) for path in paths):
        return ()
    return tuple(map(str, paths))


def keep_node_ids(session: pytest.Session, paths: tuple[str, ...]) -> None:
    """Let node ids of ``session`` begin where those of the controller begin; call this when its collection starts."""
    if paths:
        set_command_line_paths(session, map(Path, paths))
