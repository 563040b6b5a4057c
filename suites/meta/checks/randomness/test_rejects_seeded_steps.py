"""The check of random streams detects seeds that a step sets and takes back, and accepts joint decisions of ranks."""

from __future__ import annotations

import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_random_streams

from ...torchs_limits import NO_POWER_SGD


def seeded_by_rank():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    torch.manual_seed(1 + dist.get_rank())
    np.random.seed(1 + dist.get_rank())
    random.seed(1 + dist.get_rank())
    return model


@contextmanager
def numpy_seeded(*seeds):
    kept = np.random.get_state()
    np.random.seed(seeds)
    try:
        yield
    finally:
        np.random.set_state(kept)


@contextmanager
def python_seeded(*seeds):
    kept = random.getstate()
    random.seed(str(seeds))
    try:
        yield
    finally:
        random.setstate(kept)


def numpys_mask():
    return torch.from_numpy(np.random.rand(2, 4) < 0.5)


def pythons_mask():
    return torch.tensor([[random.random() < 0.5 for _ in range(4)] for _ in range(2)])


class Masking:
    """A step with a mask that is drawn under a seed of its own."""

    def __init__(self, seeded, mask, *, of_rank, of_step):
        self.seeded, self.mask, self.of_rank, self.of_step = seeded, mask, of_rank, of_step
        self.steps = {}

    def __call__(self, model):
        rank = dist.get_rank()
        number = self.steps[rank] = self.steps.get(rank, -1) + 1
        with self.seeded(42, *[rank] * self.of_rank, *[number] * self.of_step):
            mask = self.mask()
        model(torch.ones(2, 4).masked_fill(mask, 0.0)).sum().backward()


ways = pytest.mark.parametrize(
    ("seeded", "mask", "name"),
    [(numpy_seeded, numpys_mask, "numpy.random"), (python_seeded, pythons_mask, "the random module")],
)


@ways
def test_a_mask_may_be_drawn_under_a_seed_of_rank_and_step(world, seeded, mask, name):
    check_random_streams(seeded_by_rank, Masking(seeded, mask, of_rank=True, of_step=True), world)


@ways
def test_a_seed_that_is_taken_back_is_seen_where_ranks_or_steps_share_it(world, seeded, mask, name):
    with pytest.raises(AssertionError, match=rf"ranks 0 and 1 draw the same random numbers: rank 0 in {name}, set at "):
        check_random_streams(seeded_by_rank, Masking(seeded, mask, of_rank=False, of_step=True), world)
    with pytest.raises(AssertionError, match=rf"rank 0 draws in step 1 the random numbers of step 0: {name}, set at "):
        check_random_streams(seeded_by_rank, Masking(seeded, mask, of_rank=True, of_step=False), world)


def test_a_step_that_seeds_is_seen_though_ranks_draw_numbers_unlike_in_number(world):
    def step(model):
        np.random.seed(7)
        np.random.rand(3 + dist.get_rank())

    with pytest.raises(
        AssertionError, match=r"ranks 0 and 1 draw the same random numbers: rank 0 in numpy.random, set"
    ):
        check_random_streams(seeded_by_rank, step, world)


def test_what_set_the_streams_before_does_so_afterwards(world):
    setters = np.random.seed, np.random.set_state, random.seed, random.setstate
    check_random_streams(seeded_by_rank, lambda model: model(torch.ones(2, 4)), world)
    assert (np.random.seed, np.random.set_state, random.seed, random.setstate) == setters


def test_the_global_generator_counts_also_where_it_is_named(world):
    def noisy(model):
        return model[0](torch.ones(2, 4) + torch.randn(2, 4, generator=torch.default_generator))

    check_random_streams(seeded_by_rank, noisy, world)
    with pytest.raises(AssertionError, match=r"draw the same random numbers: rank 0 in aten.randn.generator at"):
        check_random_streams(lambda: torch.manual_seed(0) and nn.Sequential(nn.Linear(4, 4)), noisy, world)


class Dropping(nn.Module):
    """A model that drops a layer on all ranks or on none, and elements on each rank independently."""

    def __init__(self, seed):
        super().__init__()
        self.layer, self.dropout, self.seed, self.calls = nn.Linear(4, 4), nn.Dropout(), seed, 0

    def forward(self, x):
        self.calls += 1
        return self.dropout(self.layer(x) if keeps(self.seed(), self.calls) else x)


def keeps(seed, call):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + call)
        return bool(torch.rand(()) > 0.3)


def forward(model):
    return model(torch.ones(2, 4))


def dropping(seed):
    def make():
        torch.manual_seed(0)
        model = Dropping(seed)
        torch.manual_seed(1 + dist.get_rank())
        return model

    return make


def test_ranks_may_decide_together_in_a_function(world):
    check_random_streams(dropping(lambda: 1000), forward, world, agreed=[keeps])
    with pytest.raises(AssertionError, match=r"draw the same random numbers: rank 0 in aten.rand.default"):
        check_random_streams(dropping(lambda: 1000), forward, world)
    with pytest.raises(
        AssertionError, match=r"ranks 0 and 1 decide together and draw other numbers: rank 0 in aten.ran"
    ):
        check_random_streams(dropping(lambda: 1000 * dist.get_rank()), forward, world, agreed=[keeps])
    with pytest.raises(ValueError, match=r"functions in Python, got <built-in function len>"):
        check_random_streams(dropping(lambda: 1000), forward, world, agreed=[len])


@NO_POWER_SGD
def test_torchs_power_sgd_draws_alike_on_all_ranks(world):
    def make():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 16)))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        torch.manual_seed(1 + dist.get_rank())
        return model

    def step(model):
        model.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()

    check_random_streams(make, step, world, steps=6, agreed=[powerSGD_hook.powerSGD_hook])
