"""Phases of an item that passed in a rank: only hooks receive their reports, so most often no report is needed."""

from __future__ import annotations

from typing import Any

import pytest

from pdlcheck.compat.pytest.items import results_key
from pdlcheck.harness.fastpath.switch import is_plain

__all__ = ["needs_report", "note_passed"]

# For a phase that passed, hooks in these modules only do what note_passed does, or handle xfail marks.
_IDLE = ("_pytest.", "pdlcheck.", "_hypothesis_pytestplugin")
_BENCHMARK = "pytest_benchmark."  # its hook acts only if the test has the fixture ``benchmark``

_known = pytest.StashKey[tuple[list[Any], list[str]]]()


def needs_report(item: pytest.Function, when: str) -> bool:
    """Return whether a hook could do something with the report of a phase that passed."""
    if is_plain(item.config):
        return True
    hooks = item.ihook.pytest_runtest_makereport.get_hookimpls()
    impls, others = item.config.stash.get(_known, ([], []))
    if hooks != impls:  # by identity: they differ if conftest files were loaded or do not apply
        modules = [impl.function.__module__ for impl in hooks]
        others = [module for module in modules if not f"{module}.".startswith(_IDLE)]
        item.config.stash[_known] = hooks, others
    if any(not module.startswith(_BENCHMARK) or "benchmark" in item.fixturenames for module in others):
        return True
    return when == "call" and item.get_closest_marker("xfail") is not None


def note_passed(item: pytest.Item, when: str) -> None:
    """Record a phase that passed as pytest's own hooks do, for ``tmp_path``."""
    item.stash.setdefault(results_key, {})[when] = True
