"""What the pytest session in a rank imports, imported once in the fork server: the parts of pytest and its plugins.

A plugin that cannot be imported here is left to the rank, where its error says more.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os

from _pytest.config import default_plugins

from pdlcheck.harness.rank import session as rank_session

__all__ = ["rank_session"]

for _name in default_plugins:
    importlib.import_module(f"_pytest.{_name}")
if not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
    for _plugin in importlib.metadata.entry_points(group="pytest11"):
        with contextlib.suppress(Exception):
            _plugin.load()
