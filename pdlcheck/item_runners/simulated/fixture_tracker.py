"""The fixtures that a simulated rank has set up, or is setting up.

pytest's request only knows those that the test names and that are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

__all__ = ["Begun", "FixtureTrackerPlugin", "noting_of"]

_NAME = "pdlcheck.item_runners.simulated.fixture_tracker"


class Begun:
    """The fixtures of one rank; ``on_end`` is called on the rank when a set-up has ended, with or without an error."""

    def __init__(self) -> None:
        self.on_end: Callable[[Any], object] = _nobody_asks
        self.ended: dict[Any, None] = {}  # definitions, in the order in which they ended
        self.under_way: dict[Any, Any] = {}  # definitions with their requests, the outermost first

    def is_for_all(self) -> bool:
        """Return whether a fixture that all ranks share is being set up."""
        return any(definition.scope != "function" for definition in self.under_way)

    def in_order(self) -> list[Any]:
        """Return the definitions that are set up or being set up; the last one must be finished first."""
        return [*(one for one in self.ended if one not in self.under_way), *reversed(self.under_way)]


class FixtureTrackerPlugin:
    """A pytest plugin that records set-ups.

    ``present`` is the record of the running rank, while it may set up fixtures.
    """

    def __init__(self) -> None:
        self.present: Begun | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
        """Record the begin and the end of a set-up."""
        begun = self.present
        if begun is None:
            return (yield)
        begun.under_way[fixturedef] = request
        try:
            return (yield)
        finally:
            del begun.under_way[fixturedef]
            begun.ended.pop(fixturedef, None)
            begun.ended[fixturedef] = None
            if self.present is begun:  # otherwise the run was abandoned while this rank waited
                begun.on_end(fixturedef)


def _nobody_asks(definition: Any) -> None:
    pass


def noting_of(config: pytest.Config) -> FixtureTrackerPlugin:
    """Return the plugin of this session; register it when simulated ranks first need it."""
    plugin: FixtureTrackerPlugin | None = config.pluginmanager.getplugin(_NAME)
    if plugin is None:
        plugin = FixtureTrackerPlugin()
        config.pluginmanager.register(plugin, _NAME)
    return plugin
