"""The set-up of fixtures on simulated ranks: which rank sets up a fixture, and for whom."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pdlcheck.harness.rank_context import RankContext, leave_rank_context, set_rank_context
from pdlcheck.harness.reporting.rank_benchmarks import name_benchmark
from pdlcheck.harness.reporting.rank_subtests import keep_reports
from pdlcheck.item_runners.simulated.own_fixtures import Captured, follow_fixture, follow_late_log
from pdlcheck.item_runners.simulated.rank_items import RankItem

__all__ = ["FixturePhase"]

_NAME = "pdlcheck.item_runners.simulated.rank_fixtures"


class FixturePhase:
    """A phase in which a rank sets up or tears down fixtures, or in which its body may request some.

    Args:
        rank: the item of the rank.
        context: the values of the fixtures ``rank``, ``world_size``, ``device`` and ``group``.
        notes: notes of the item that a fixture's teardown may remove; the teardown of each rank needs them.
    """

    def __init__(self, rank: RankItem, context: RankContext, notes: dict[Any, Any] | None = None) -> None:
        self.rank = rank
        self.context = context
        self._notes = notes or {}
        self._hooks = _hooks_of(rank.item.config)

    def arrive(self) -> None:
        """Let fixtures be those of this rank, when the rank gets the turn."""
        set_rank_context(self.context)
        for key, value in self._notes.items():
            self.rank.item.stash.setdefault(key, value)
        self._hooks.present = self

    def leave(self) -> None:
        """Let fixtures be those of no rank, when the rank passes the turn."""
        if self._hooks.present is self:  # otherwise the run was abandoned while this rank waited
            self._hooks.present = None
        leave_rank_context(self.context)

    def follow(self, definition: Any, value: object) -> None:
        """Separate the effects of a fixture for this rank, from the end of its set-up on."""
        item = self.rank.item
        own = follow_fixture(value)
        if isinstance(own, Captured):
            self.rank.captured.append(own)
        keep_reports(value, self.rank.reports)
        name_benchmark(value, self.context.rank)
        if definition.argname == "caplog" and "caplog" not in item.fixturenames:
            follow_late_log(item)


class _Hooks:
    """A pytest plugin that sees the set-ups of the running rank, which is ``present``."""

    def __init__(self) -> None:
        self.present: FixturePhase | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Record that a fixture for all ranks is being set up, or separate the effects of a rank's own."""
        present = self.present
        if present is None:
            return (yield)
        if fixturedef.scope != "function":
            with present.rank.set_up_for_all(fixturedef):
                return (yield)
        value = yield
        if self.present is present:
            present.follow(fixturedef, value)
        return value


def _hooks_of(config: pytest.Config) -> _Hooks:
    """Return the plugin of this session; register it when simulated ranks first need it."""
    plugin: _Hooks | None = config.pluginmanager.getplugin(_NAME)
    if plugin is None:
        plugin = _Hooks()
        config.pluginmanager.register(plugin, _NAME)
    return plugin
