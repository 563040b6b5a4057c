"""check_random_streams sees what the workers of a DataLoader draw: other numbers on every rank and in every pass."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pdlcheck.checks import check_random_streams

# torch warns if there are fewer cores than workers
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

WORKERS = 2


class Noisy(Dataset):
    """Samples with noise of NumPy's or Python's generator, or of torch's."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 4

    def __getitem__(self, i):
        if self.kind == "numpy":
            return np.random.uniform()
        return random.random() if self.kind == "random" else torch.rand(()).item()


class Stream(IterableDataset):
    """The same as an iterable, without batches."""

    def __iter__(self):
        for _ in range(3):
            yield np.random.uniform()


def one_seed(worker):
    seed_all(17 + worker)


def of_rank(worker, rank):
    seed_all(17 + rank * WORKERS + worker)


def of_pass(worker):
    seed_all(torch.initial_seed() % 2**32)


def of_nothing(worker):
    pass


def seed_all(seed):
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def make(init, dataset, **options):
    torch.manual_seed(100 + dist.get_rank())
    if init is of_rank:
        init = functools.partial(of_rank, rank=dist.get_rank())
    return DataLoader(dataset, num_workers=WORKERS, worker_init_fn=init, **options)


def one_pass(loader):
    for _ in loader:
        pass


@pytest.mark.parametrize("kind", ["numpy", "random", "torch"])
def test_check_random_streams_rejects_workers_with_one_seed_on_all_ranks(world, kind):
    words = r"ranks 0 and 1 draw the same random numbers: .* in worker . of a DataLoader"
    with pytest.raises(AssertionError, match=rf"{words}(.|\n)*worker_init_fn gives workers of both ranks one seed"):
        check_random_streams(lambda: make(one_seed, Noisy(kind)), one_pass, world, steps=1)


@pytest.mark.parametrize("init", [of_rank, of_pass, of_nothing, None])
def test_check_random_streams_accepts_workers_with_seeds_of_their_own(world, init):
    check_random_streams(lambda: make(init, Noisy("numpy")), one_pass, world, steps=1)


def test_check_random_streams_rejects_workers_with_one_seed_in_every_pass(world):
    with pytest.raises(AssertionError, match=r"draws in step 1 the random numbers of step 0(.|\n)*in every pass"):
        check_random_streams(lambda: make(of_rank, Noisy("numpy")), one_pass, world)
    check_random_streams(lambda: make(of_pass, Noisy("numpy")), one_pass, world)


def test_check_random_streams_sees_workers_without_batches(world):
    check_random_streams(lambda: make(None, Stream(), batch_size=None), one_pass, world, steps=1)
    with pytest.raises(AssertionError, match="in worker"):
        check_random_streams(lambda: make(one_seed, Stream(), batch_size=None), one_pass, world, steps=1)


def test_ranks_may_agree_on_what_workers_draw(world):
    def also_own(loader):
        one_pass(loader)
        torch.rand(1)

    def made():
        random.seed(0)
        return make(one_seed, Noisy("random"))

    check_random_streams(made, also_own, world, steps=1, agreed=["random"])


def test_a_loader_has_its_own_functions_after_the_step(world):
    def step(loader):
        one_pass(loader)
        seen.append((loader.worker_init_fn, loader.collate_fn))

    def made():
        loader = make(of_nothing, Noisy("numpy"))
        own.append((loader.worker_init_fn, loader.collate_fn))
        kept.append(loader)
        return loader

    def both():
        from pdlcheck.checks.randomness.draws import Notes
        from pdlcheck.checks.randomness.workers import workers_noted

        loader = made()
        with workers_noted(Notes(), (functools.partial(step, loader),), ()):
            step(loader)
        return seen[0] != own[0], (loader.worker_init_fn, loader.collate_fn) == own[0]

    own, seen, kept = [], [], []
    assert world.run(both, world_size=1) == [(True, True)]


@pytest.mark.slow
def test_workers_may_be_spawned():
    from pdlcheck.worlds import get_world

    world = get_world("gloo")
    try:
        with pytest.raises(AssertionError, match="worker_init_fn gives workers of both ranks one seed"):
            check_random_streams(spawned, one_pass, world, steps=1)
    finally:
        world.close()


def spawned():
    return make(one_seed, Noisy("numpy"), multiprocessing_context="spawn")
