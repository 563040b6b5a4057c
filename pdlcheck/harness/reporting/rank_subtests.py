"""Subtests of ranks: equal subtests of several ranks are reported once, with their ranks unless all ranks ran them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from pdlcheck.compat.pytest.subtests import count_failed, is_subtests, send_reports
from pdlcheck.harness.reporting.common_notes import words_of

__all__ = ["id_of", "keep_reports", "report"]

Reported = dict[str, Any]  # a serialized report of pytest


def report(item: pytest.Item, world_size: int, reported: Mapping[int, list[Reported]]) -> None:
    """Report the subtests of every rank to pytest, in the controller."""
    config = item.config
    merged: dict[str, tuple[list[int], Reported]] = {}
    for rank, reports in reported.items():
        seen: defaultdict[str, int] = defaultdict(int)
        for data in reports:
            what = words_of((data.get("_subtest.context"), data["outcome"], _crash(data)))
            seen[what] += 1
            merged.setdefault(f"{what} {seen[what]}", ([], data))[0].append(rank)
    for ranks, data in merged.values():
        context = data.get("_subtest.context")
        if context is not None and len(ranks) < world_size:
            who = f"rank {', '.join(map(str, ranks))}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            context["msg"] = who if context["msg"] is None else f"{who}: {context['msg']}"
        told = config.hook.pytest_report_from_serializable(config=config, data=data)
        if told is None:
            continue
        if told.failed:
            count_failed(config, id_of(item))
        capture = config.pluginmanager.getplugin("capturemanager")
        with nullcontext() if capture is None else capture.global_and_fixture_disabled():
            item.ihook.pytest_runtest_logreport(report=told)


def keep_reports(value: Any, reports: list[Reported]) -> None:
    """Keep, on a simulated rank, the reports of a ``subtests`` fixture for :func:`report`; ignore other values."""
    if is_subtests(value):
        send_reports(value, partial(_Hooks, reports=reports), _Request)


class _Hooks:
    def __init__(self, hooks: Any, config: pytest.Config, reports: list[Reported]) -> None:
        self._hooks = hooks
        self._config = config
        self._reports = reports

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


class _Request:
    def __init__(self, request: Any) -> None:
        self._request = request
        self.config = _Config(request.config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Config:
    """A stand-in for the configuration.

    A subtest captures the output of the whole process and counts its failures in the configuration's stash. With this
    stand-in it does neither.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self.stash: defaultdict[Any, Any] = defaultdict(lambda: defaultdict(int))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def getoption(self, name: str, *args: Any) -> Any:
        return "no" if name == "capture" else self._config.getoption(name, *args)


def _crash(data: Mapping[str, Any]) -> Any:
    longrepr = data.get("longrepr")
    return longrepr.get("reprcrash") if isinstance(longrepr, dict) else longrepr


def id_of(item: pytest.Item) -> Any:
    """Return the value by which pytest identifies the item."""
    return getattr(item, "id", item.nodeid)  # some releases of pytest 9 use ``id``, some ``nodeid``
