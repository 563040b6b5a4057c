"""Calls of a hook in the user's conftest files only, at the end of a session whose other plugins must not act."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["of_conftest_files"]


def of_conftest_files(config: pytest.Config, hook: str) -> Any:
    """Return a caller of ``hook`` in conftest files only; another process writes the reports, caches and tables."""
    plugins: Any = config.pluginmanager
    others = [plugin for plugin in plugins.get_plugins() if plugin not in plugins._conftest_plugins]
    return plugins.subset_hook_caller(hook, others)
