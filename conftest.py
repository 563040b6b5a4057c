"""Settings of the project's own tests."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=10, deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_finish():
    """Freeze the collected tests and torch for the garbage collector; its collections then take a sixth of the time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def inner_runs_keep_the_order_of_the_file(request, monkeypatch):
    """Switch pytest-randomly off in pytest runs that a test starts, so that they keep the order of the file."""
    if "pytester" in request.fixturenames:
        request.getfixturevalue("pytester")  # pytester clears the variable
        monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly")


@pytest.fixture(autouse=True)
def names_in_docstring_examples(request, doctest_namespace):
    """Provide the names that docstring examples use without an import."""
    if request.node.name.endswith(".pagerank_v0"):
        pytest.importorskip("dgl", reason="pagerank_v0 needs DGL: pip install pdlcheck[dgl], on Python 3.11")
    import numpy
    import torch
    import torch.distributed

    from pdlcheck.worlds import get_world

    doctest_namespace |= {"dist": torch.distributed, "np": numpy, "torch": torch, "world": get_world("sim")}
