"""Tests of the PowerSGD hook."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.primitives import PowerSGDState

from .models import MATRICES, applied, drawn, mean, rank_one, residual, wrappers


@pytest.mark.verifies("power_sgd")
@wrappers
def test_power_sgd_finds_a_mean_of_its_own_rank_exactly(subject, world, wrapper):
    """The columns of every rank's matrix lie in one plane."""

    def train():
        draws = torch.Generator().manual_seed(0)
        plane = torch.randn(6, 2, generator=draws, dtype=torch.float64)
        grads = [[[plane @ torch.randn(2, 8, generator=draws, dtype=torch.float64)]] for _ in range(3)]
        state = {"rank": 2, "start_step": 0, "min_compression": 0.5}
        found, _ = applied(lambda m: (PowerSGDState(m, **state), subject), grads, wrapper=wrapper)
        return found[0][0], mean(grads, 0, 0)

    for found, expected in world.run(train, world_size=3):
        assert (found - expected).abs().max() <= 1e-13  # a dozen products of numbers below 10


@pytest.mark.verifies("power_sgd")
@wrappers
def test_warm_start_comes_to_the_best_approximation(subject, world, wrapper):
    """The same gradient in every step, without error feedback, is power iteration, which ends at the first pair."""
    grads = [[rank[0]] * 60 for rank in drawn(2, 1, [(6, 8)])]

    def train():
        def make(warm):
            keywords = {"start_step": 0, "min_compression": 0.5, "warm_start": warm, "error_feedback": False}
            return lambda m: (PowerSGDState(m, **keywords), subject)

        return [[step[0] for step in applied(make(warm), grads, wrapper=wrapper)[0]] for warm in (True, False)]

    goal = mean(grads, 0, 0)
    left, values, right = torch.linalg.svd(goal)
    best = values[0] * left[:, :1] @ right[:1]
    warm, cold = world.run(train, world_size=2)[0]
    assert (warm[-1] - best).norm() <= 1e-6 * best.norm()
    assert (warm[0] - best).norm() > 1e-2 * best.norm()
    assert min((step - best).norm() for step in cold) > 1e-3 * best.norm()
    assert not torch.equal(cold[0], cold[1]), "other random factors at each step"


@pytest.mark.verifies("power_sgd")
@wrappers
@pytest.mark.world_size(2)
def test_power_sgd_is_the_mean_before_it_starts_and_of_what_it_does_not_compress(subject, world_size, wrapper):
    grads = drawn(world_size, 3, MATRICES)
    make = partial(PowerSGDState, start_step=2, min_compression=1.0)
    found, state = applied(lambda m: (make(m), subject), grads, wrapper=wrapper)
    assert state.step == 3
    for step in range(3):
        for place, shape in enumerate(MATRICES):
            plain = step < 2 or len(shape) == 1
            assert torch.equal(found[step][place], mean(grads, step, place)) == plain
    assert sorted(residual(state)) == ["weights.0", "weights.2"]


@pytest.mark.verifies("PowerSGDState")
def test_only_matrices_that_shrink_are_compressed(subject):
    model = nn.Linear(10, 10)
    assert subject(model, rank=2, min_compression=2).compresses(model.weight)  # 100 numbers, 40 with rank 2
    assert not subject(model, rank=2, min_compression=2.5).compresses(model.weight)
    assert not subject(model).compresses(model.bias)


@pytest.mark.verifies("power_sgd")
@wrappers
@pytest.mark.world_size(2)
def test_factors_depend_on_the_seed_only(subject, world_size, wrapper):
    grads = drawn(world_size, 1, [(6, 8)])

    def first(seed):
        torch.manual_seed(dist.get_rank() + seed)  # the global random stream of the rank has no effect
        make = partial(PowerSGDState, start_step=0, seed=seed)
        return applied(lambda m: (make(m), subject), grads, wrapper=wrapper)[0][0][0]

    same, again, other = first(0), first(0), first(1)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


@pytest.mark.verifies("power_sgd")
@wrappers
@pytest.mark.world_size(2)
def test_a_step_of_zeros_does_not_spoil_the_next(subject, world_size, wrapper):
    grads = drawn(world_size, 3, MATRICES)
    for rank in grads:
        rank[1] = [torch.zeros(shape, dtype=torch.float64) for shape in MATRICES]
    found, state = applied(lambda m: (rank_one(m)[0], subject), grads, wrapper=wrapper)
    assert not any(g.any() for g in found[1])
    assert all(g.any() for g in found[2])
    total = sum(step[0] for step in found)
    kept = residual(state)["weights.0"]
    dist.all_reduce(kept)
    expected = mean(grads, 0, 0) + mean(grads, 2, 0)
    assert (total + kept / world_size - expected).abs().max() <= 1e-14
