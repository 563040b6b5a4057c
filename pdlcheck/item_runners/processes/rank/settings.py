"""The process settings that test files and fixtures of wider scope change in a rank.

They stay in force for later tests, as in one process. Every call of the ranks begins with the controller's settings,
so settings that a test leaves behind are dropped.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pdlcheck.worlds.processes.exchange.settings import present, put
from pdlcheck.worlds.processes.rank import own_settings

__all__ = ["RankSettings"]


class RankSettings:
    """A pytest plugin of the session in a rank."""

    def __init__(self) -> None:
        self.hold()
        self._has_finished = False

    def hold(self) -> None:
        """Store the present settings as those that apply to later tests."""
        self._held = present()
        own_settings.hold()

    def put_back(self) -> None:
        """Restore the stored settings."""
        own_settings.put_back()
        if present() != self._held:
            put(self._held)

    def after_teardown(self) -> None:
        """Store the present settings if a fixture of wider scope has ended: its teardown restored earlier ones."""
        if self._has_finished:
            self._has_finished = False
            self.hold()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Store what a fixture of wider scope has set."""
        result = yield
        if fixturedef.scope != "function":
            self.hold()
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        """Record that a fixture of wider scope has ended."""
        if fixturedef.scope != "function":
            self._has_finished = True
