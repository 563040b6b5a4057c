"""Phases of an item that passed in a rank: their report is seen there by hooks alone, so most often nobody sees it."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.tmpdir import tmppath_result_key

__all__ = ["needs_report", "note_passed"]

# hooks in these modules do nothing for a phase that passed, but what note_passed does, and what xfail marks ask for
_IDLE = ("_pytest.", "pdlcheck.", "_hypothesis_pytestplugin")
_BENCHMARK = "pytest_benchmark."  # looks at a fixture of that name

_known = pytest.StashKey[tuple[list[Any], list[str]]]()


def needs_report(item: pytest.Function, when: str) -> bool:
    """Whether a hook could do something with the report of a phase that passed."""
    hooks = item.ihook.pytest_runtest_makereport.get_hookimpls()
    impls, others = item.config.stash.get(_known, ([], []))
    if hooks != impls:  # compared by identity; a conftest file has come, or does not count for this item
        modules = [impl.function.__module__ for impl in hooks]
        others = [module for module in modules if not f"{module}.".startswith(_IDLE)]
        item.config.stash[_known] = hooks, others
    if any(not module.startswith(_BENCHMARK) or "benchmark" in item.fixturenames for module in others):
        return True
    return when == "call" and item.get_closest_marker("xfail") is not None


def note_passed(item: pytest.Item, when: str) -> None:
    """What pytest's own hooks remember of a phase that passed, for ``tmp_path``."""
    item.stash.setdefault(tmppath_result_key, {})[when] = True
