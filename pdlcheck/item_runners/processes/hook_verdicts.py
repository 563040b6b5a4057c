"""Failures that a user's hook makes of phases that passed in a rank, as ``pytest_runtest_makereport`` can.

The hook also runs in the controller, after the failure has arrived there. A hook that inverts outcomes would invert
this failure back, so the rank's verdict is restored before the report is logged.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

__all__ = ["remember"]

_NAME = "pdlcheck.item_runners.processes.hook_verdicts"


def remember(item: pytest.Item, when: str, words: str) -> None:
    """Record, in the controller, that a hook has failed this phase of the item in a rank."""
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
        """Restore the failure before any other plugin receives the report."""
        words = self.words.pop((report.nodeid, str(report.when)), None)
        if words is not None and report.passed:
            report.outcome, report.longrepr = "failed", words
        return (yield)
