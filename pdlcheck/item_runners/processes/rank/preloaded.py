"""The imports of a rank's pytest session, done once in the fork server: pytest's own plugins and installed plugins.

If a plugin cannot be imported here, the rank tries again, because its error message is better.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

from pdlcheck.compat.pytest.config import import_default_plugins
from pdlcheck.item_runners.processes.rank import session as rank_session

__all__ = ["rank_session"]

import_default_plugins()
if not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
    for _plugin in importlib.metadata.entry_points(group="pytest11"):
        with contextlib.suppress(Exception):
            _plugin.load()
