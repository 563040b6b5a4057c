"""A layer that occurs twice in the model is one layer: its buffers are the result of its passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdlcheck.checks import check_pipedream

from .models import MSE, SGD, samples, starter

pytestmark = pytest.mark.verifies("Pipeline")


def normalised_twice():
    norm = nn.BatchNorm1d(3)
    return nn.Sequential(norm, nn.Linear(3, 3), norm, nn.Linear(3, 3), nn.Linear(3, 3))


class Counting(nn.Linear):
    def __init__(self, calls):
        super().__init__(3, 3)
        self.register_buffer("calls", calls)

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def counted_together():
    calls = torch.zeros(())
    return nn.Sequential(Counting(calls), Counting(calls), nn.Linear(3, 3), nn.Linear(3, 3))


@pytest.mark.if_subject_takes("recompute")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make", [normalised_twice, counted_together])
def test_buffers_are_those_of_the_passes(subject, world, make, recompute):
    """Regression test: the pass on zeros and the second pass of recomputation left their buffers in place."""

    def train():
        torch.manual_seed(0)
        cut = 3 if make is normalised_twice else 2
        pipeline = subject(make(), MSE, n_microbatches=3, split=[cut], recompute=recompute)
        for seed in range(3):
            pipeline.step(*samples(7, seed=seed))
        same = [name for name, _ in pipeline.module.named_buffers(remove_duplicate=False)]
        return {name: pipeline.module.get_buffer(name).clone() for name in same}

    torch.manual_seed(0)
    model = make()
    for seed in range(3):
        for part in samples(7, seed=seed)[0].tensor_split(3):
            model(part)
    expected = dict(model.named_buffers(remove_duplicate=False))
    first, second = world.run(train, world_size=2)
    assert first.keys() == expected.keys()
    assert not second
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, msg=name)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_pipedream_trains_a_layer_that_a_stage_has_twice(subject, world, recompute):
    def twice():
        layer = nn.Linear(3, 3)
        return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 3))

    keywords = {"n_microbatches": 9, "optimizer": SGD}
    start = starter(subject, MSE, schedule="pipedream", split=[4], recompute=recompute, **keywords)
    check_pipedream(start, twice, MSE, samples(18), world, world_size=2, **keywords)
