"""What files and fixtures of wider scope have set in a rank: it holds for the tests after, as in one process.

A call of ranks begins with the controller's settings, so that what a test leaves behind is nobody's.
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
        """What is set now holds for what comes."""
        self._held = present()
        own_settings.hold()

    def put_back(self) -> None:
        """Let that be set which holds."""
        own_settings.put_back()
        if present() != self._held:
            put(self._held)

    def after_teardown(self) -> None:
        """A fixture of wider scope that has ended takes back what it has set."""
        if self._has_finished:
            self._has_finished = False
            self.hold()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        result = yield
        if fixturedef.scope != "function":
            self.hold()
        return result

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function":
            self._has_finished = True
