"""Calls of a hook in the user's conftest files only, at the end of a session whose other plugins must not act."""

from __future__ import annotations

from typing import Any

import pytest

from pdlcheck.compat.pytest.config import conftest_files

__all__ = ["of_conftest_files"]


def of_conftest_files(config: pytest.Config, hook: str) -> Any:
    """Return a caller of ``hook`` in conftest files only; another process writes the reports, caches and tables."""
    plugins, files = config.pluginmanager, conftest_files(config)
    return plugins.subset_hook_caller(hook, [plugin for plugin in plugins.get_plugins() if plugin not in files])
