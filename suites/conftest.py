"""Settings of the suites in a clone and in an installed package with ``pytest --pyargs``."""

from __future__ import annotations

import pytest

from pdlcheck.harness.running.examples import drop_default_deadline


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts many processes; in a clone, pytest leaves it out without -m")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Drop Hypothesis' default deadline, because the first example may compile code or start ranks."""
    drop_default_deadline(item)
