"""Settings of the project's own tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def names_in_docstring_examples(doctest_namespace):
    """What the examples of docstrings take for granted."""
    import numpy
    import torch
    import torch.distributed

    from pdlcheck.worlds import get_world

    doctest_namespace |= {"dist": torch.distributed, "np": numpy, "torch": torch, "world": get_world("sim")}
