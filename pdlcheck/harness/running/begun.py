"""Which fixtures a simulated rank has set up or begun to; pytest's request knows those alone that it named and are."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

__all__ = ["Begun", "Noting", "noting_of"]

_NAME = "pdlcheck.harness.running.begun"


class Begun:
    """Of one rank.

    ``on_end`` is called on the rank when a set-up has ended, well or not.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[Any], object] = _nobody_asks
        self.ended: dict[Any, None] = {}  # definitions, in the order of their ends
        self.under_way: dict[Any, Any] = {}  # with the request, the outermost first

    def is_for_all(self) -> bool:
        """Whether a fixture is being set up that all ranks share."""
        return any(definition.scope != "function" for definition in self.under_way)

    def in_order(self) -> list[Any]:
        """The definitions that are set up or have begun to be; the last is to be finished first."""
        return [*(one for one in self.ended if one not in self.under_way), *reversed(self.under_way)]


class Noting:
    """A pytest plugin. ``present``: of the rank that runs, while it may set up fixtures."""

    def __init__(self) -> None:
        self.present: Begun | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Generator[None, object, object]:
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
            if self.present is begun:  # else the ranks were given up while this one waited
                begun.on_end(fixturedef)


def _nobody_asks(definition: Any) -> None:
    pass


def noting_of(config: pytest.Config) -> Noting:
    """The plugin of this session, registered when simulated ranks first need it."""
    plugin: Noting | None = config.pluginmanager.getplugin(_NAME)
    if plugin is None:
        plugin = Noting()
        config.pluginmanager.register(plugin, _NAME)
    return plugin
