"""The check of recomputed gradients rejects stages that draw new random numbers, or update buffers twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdlcheck.checks import check_same_gradients
from pdlcheck.errors import Inconclusive
from pdlcheck.worlds import get_world

from ..pipelines_by_hand import EVEN, MSE, M, net, starter


def random_net():
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Recomputing:
    """One stage on one rank, whose forward pass runs again before its backward pass."""

    def __init__(self, model, *, preserve_rng_state=True, twice=False):
        self.module = model
        self.preserve, self.twice = preserve_rng_state, twice

    def step(self, x, y):
        for part, goal in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            if self.twice:
                with torch.random.fork_rng(), torch.no_grad():
                    self.module(part)
            out = torch.utils.checkpoint.checkpoint(
                self.module[:2], part, use_reentrant=False, preserve_rng_state=self.preserve
            )
            MSE(self.module[2:](out), goal).backward()


class Plain(Recomputing):
    def step(self, x, y):
        for part, goal in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            MSE(self.module(part), goal).backward()


def same(start, make=random_net, other=None):
    check_same_gradients(start, other or starter(Plain), make, EVEN, get_world("sim"), world_size=2)


def test_check_same_gradients_accepts_torchs_checkpoint():
    same(starter(Recomputing))


def test_check_same_gradients_rejects_fresh_dropout_masks():
    with pytest.raises(AssertionError, match=r"pipeline: rank 0 holds \S+ at .* of gradient of '0.weight' in step 0"):
        same(starter(Recomputing, preserve_rng_state=False))


def test_check_same_gradients_rejects_a_second_update_of_running_statistics():
    with pytest.raises(
        AssertionError, match=r"of buffer '2.running_mean'[\s\S]*the second forward pass changed buffers"
    ):
        same(starter(Recomputing, twice=True))


def test_check_same_gradients_does_not_decide_without_random_numbers():
    with pytest.raises(Inconclusive, match="gradients do not depend on random numbers"):
        same(starter(Recomputing), make=net)
