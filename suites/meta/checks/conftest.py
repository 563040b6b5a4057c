"""The worlds on which tests of checks run: on simulated ranks all cases, on others the first case of each function."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    """Mark further cases on other worlds as slow where the same case runs on simulated ranks, too.

    A verdict is computed in the same way on every world, and starting a run on processes takes longer than most checks.
    """
    all_names = {item.nodeid for item in items}
    seen = set()
    for item in items:
        world = getattr(item, "callspec", None) and item.callspec.params.get("world")
        if not isinstance(world, str) or world == "sim" or not item.path.is_relative_to(HERE):
            continue
        function = world, item.nodeid.partition("[")[0]
        if function in seen and item.nodeid.replace(f"[{world}", "[sim", 1) in all_names:
            item.add_marker(pytest.mark.slow)
        seen.add(function)
