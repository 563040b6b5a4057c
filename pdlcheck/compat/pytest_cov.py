"""The private names of pytest-cov. Does not import it."""

from __future__ import annotations

from typing import Any

import pytest

from pdlcheck.compat.private import uses

__all__ = ["controller_of"]


@uses("pytest_cov.plugin.CovPlugin._disabled", lost="coverage of rank processes")
def controller_of(config: pytest.Config) -> Any:
    """Return what measures coverage in this session; None if nothing does."""
    plugin = config.pluginmanager.getplugin("_cov")  # the name that pytest-cov gives it
    return None if plugin is None or getattr(plugin, "_disabled", False) else plugin.cov_controller
