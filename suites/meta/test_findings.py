"""What pdlcheck found in torch: each finding replays, and the cure that its page names passes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from pdlcheck.errors import CollectiveMismatch, Deadlock
from pdlcheck.worlds import get_world

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"

pytestmark = pytest.mark.skipif(
    not FINDINGS.exists(), reason="needs docs/findings: run the suites in a clone of the repository"
)


@pytest.fixture
def powersgd():
    spec = importlib.util.spec_from_file_location("powersgd_order", FINDINGS / "powersgd_order.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("schedule", ["first", *(f"random:{seed}" for seed in range(8))])
def test_powersgd_with_two_buckets_reduces_in_another_order_on_each_rank(powersgd, schedule):
    with pytest.raises((CollectiveMismatch, Deadlock), match=r"all_reduce\(SUM\) of float32 \(8,\)"):
        get_world("sim", schedule=schedule).run(powersgd.train, powersgd.torchs_hook, world_size=2)


@pytest.mark.parametrize("schedule", ["first", *(f"random:{seed}" for seed in range(8))])
def test_powersgd_that_waits_bucket_by_bucket_keeps_replicas_equal(powersgd, schedule):
    one, other = get_world("sim", schedule=schedule).run(powersgd.train, powersgd.waited_hook, world_size=2)
    assert torch.equal(one, other)


def test_powersgd_with_one_bucket_keeps_replicas_equal(powersgd, monkeypatch):
    monkeypatch.setattr(powersgd, "LAYERS", 1)
    one, other = get_world("sim").run(powersgd.train, powersgd.torchs_hook, world_size=2)
    assert torch.equal(one, other)
