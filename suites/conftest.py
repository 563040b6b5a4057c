"""Settings of the suites wherever they run: from a clone, or from an installed package with ``pytest --pyargs``."""

from __future__ import annotations

import pytest

from pdlcheck.harness.running.examples import drop_default_deadline


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts many processes; in a clone, pytest leaves it out without -m")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let no property fail because it waited: what compiles, or starts ranks, takes its time in the first example."""
    drop_default_deadline(item)
