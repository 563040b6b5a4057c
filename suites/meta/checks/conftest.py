"""The worlds on which tests of checks run: on simulated ranks all of them, on others some of each file."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FUNCTIONS = 5  # of each file, with their first case


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    """Mark further tests on other worlds as slow where they run on simulated ranks, too.

    A verdict is computed in the same way on every world, and starting a run on processes takes longer than most checks.
    """
    all_names = {item.nodeid for item in items}
    seen = defaultdict(set)
    for item in items:
        world = getattr(item, "callspec", None) and item.callspec.params.get("world")
        if not isinstance(world, str) or world == "sim" or not item.path.is_relative_to(HERE):
            continue
        functions, function = seen[world, item.path], item.nodeid.partition("[")[0]
        is_further = function in functions or len(functions) >= FUNCTIONS
        if is_further and item.nodeid.replace(f"[{world}", "[sim", 1) in all_names:
            item.add_marker(pytest.mark.slow)
        else:
            functions.add(function)
