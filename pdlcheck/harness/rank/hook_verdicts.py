"""A hook of the user's may make a failure of what has passed in a rank, as ``pytest_runtest_makereport`` can.

It runs in the controller, too, after that failure has come there. One that turns outcomes round would turn it back.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

__all__ = ["remember"]

_NAME = "pdlcheck.harness.rank.hook_verdicts"


def remember(item: pytest.Item, when: str, words: str) -> None:
    """In the controller: a hook has failed this phase of the item in a rank."""
    plugin = item.config.pluginmanager.getplugin(_NAME)
    if plugin is None:
        plugin = _Verdicts()
        item.config.pluginmanager.register(plugin, _NAME)
    plugin.words[item.nodeid, when] = words


class _Verdicts:
    def __init__(self) -> None:
        self.words: dict[tuple[str, str], str] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        """Before anybody else hears of it."""
        words = self.words.pop((report.nodeid, str(report.when)), None)
        if words is not None and report.passed:
            report.outcome, report.longrepr = "failed", words
        return (yield)
