"""The checks accept models and data on CUDA devices; the same cases on the CPU show that they are sound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdlcheck.worlds import World, get_world

from .cases_by_device import CASES, Case

cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


@pytest.fixture(scope="module", params=["sim", "gloo"])
def on_cuda(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield a world whose ranks share the CUDA devices."""
    world = get_world(request.param, device="cuda")
    yield world
    world.close()


def ask(case: Case, device: str, world: Any) -> None:
    """Assert that the check accepts the correct subject, and rejects the wrong one with the message ``case.says``."""
    case.ask(device, world, False)
    with pytest.raises(AssertionError) as caught:
        case.ask(device, world, True)
    assert case.says in str(caught.value)


@cases
def test_a_case_as_it_is_asked_on_gpus(case):
    ask(case, "cpu", get_world("sim"))


@pytest.mark.gpu
@cases
def test_checks_take_models_and_data_on_cuda(case, on_cuda):
    ask(case, "cuda", on_cuda)
