"""Samplers that repeat samples by intention: correct ones pass, shards of different orders are rejected."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pdlcheck.checks import check_sampler
from pdlcheck.errors import Inconclusive


class RepeatedAugmentation:
    """A sampler that deals samples to the ranks in turn, each ``num_repeats`` times in a row.

    An epoch has as many samples as the data set, or, if ``whole``, all repeats.
    """

    def __init__(self, dataset, num_replicas, rank, num_repeats=3, whole=False):
        self.total, self.num_replicas, self.rank, self.num_repeats = len(dataset), num_replicas, rank, num_repeats
        self.epoch, self.whole = 0, whole

    def __len__(self):
        return -(-self.total * (self.num_repeats if self.whole else 1) // self.num_replicas)

    def seed(self):
        return self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(self.seed()))
        order = order.repeat_interleave(self.num_repeats)
        order = torch.cat([order, order[: -len(order) % self.num_replicas]])
        return iter(order[self.rank :: self.num_replicas][: len(self)].tolist())


class AnotherSeed(RepeatedAugmentation):
    def seed(self):
        return self.epoch + 1000 * self.rank


class SeedOfTheRank(RepeatedAugmentation):
    """A sampler that draws its seed from the random numbers of the rank."""

    def seed(self):
        return int(torch.randint(2**30, ()))


class SameOnAllRanks(RepeatedAugmentation):
    def __init__(self, dataset, num_replicas, rank, **more):
        super().__init__(dataset, num_replicas, 0, **more)


class NoEpoch(RepeatedAugmentation):
    def set_epoch(self, epoch):
        pass


class RoundedDown(RepeatedAugmentation):
    def __len__(self):
        return self.total // 256 * 256 // self.num_replicas


class NeverTheLast(RepeatedAugmentation):
    """A sampler that chooses the samples of an epoch before it draws their order."""

    def __iter__(self):
        chosen = self.total // 2
        order = torch.randperm(chosen, generator=torch.Generator().manual_seed(self.epoch))
        order = order.repeat_interleave(self.num_repeats).tolist()
        return iter(order[self.rank :: self.num_replicas][: len(self)])


class Endless:
    """A sampler without an end: one order of all samples after the other, dealt to the ranks in turn."""

    def __init__(self, dataset, num_replicas, rank, **more):
        self.total, self.num_replicas, self.rank = len(dataset), num_replicas, rank

    def seed(self):
        return 7

    def orders(self):
        generator = torch.Generator().manual_seed(self.seed())
        while True:
            yield from torch.randperm(self.total, generator=generator).tolist()

    def __iter__(self):
        return itertools.islice(self.orders(), self.rank, None, self.num_replicas)


class EndlessWithASeedOfAllRanks(Endless):
    def __init__(self, dataset, num_replicas, rank):
        super().__init__(dataset, num_replicas, rank)
        self.agreed = torch.randint(2**30, ())
        dist.broadcast(self.agreed, 0)

    def seed(self):
        return int(self.agreed)

    def __len__(self):
        return self.total


class EndlessSeedOfTheRank(Endless):
    def seed(self):
        return int(torch.randint(2**30, ()))


class EndlessSameOnAllRanks(Endless):
    def __iter__(self):
        return self.orders()


class EndlessSameOrder(Endless):
    def orders(self):
        order = torch.randperm(self.total, generator=torch.Generator().manual_seed(7)).tolist()
        return itertools.cycle(order)


class EndlessInBlocks(EndlessSameOrder):
    """A sampler in which each rank has one block of the samples."""

    def __iter__(self):
        part = -(-self.total // self.num_replicas)
        order = list(itertools.islice(self.orders(), part * self.num_replicas))
        return itertools.cycle(order[self.rank * part : (self.rank + 1) * part])


class Weighted:
    """A sampler by weights: all ranks draw one list, and each takes its part."""

    def __init__(self, dataset, num_replicas, rank):
        self.total, self.num_replicas, self.rank, self.epoch = len(dataset), num_replicas, rank, 0
        self.weights = torch.arange(self.total).double()

    def __len__(self):
        return -(-self.total // self.num_replicas)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def draw(self, seed, count):
        return torch.multinomial(self.weights, count, True, generator=torch.Generator().manual_seed(seed)).tolist()

    def __iter__(self):
        return iter(self.draw(self.epoch, len(self) * self.num_replicas)[self.rank :: self.num_replicas])


class WeightedWithSeedsOfRanks(Weighted):
    def __iter__(self):
        return iter(self.draw(self.epoch * self.num_replicas + self.rank, len(self)))


class WeightedFromTheStream:
    """A sampler like torch's WeightedRandomSampler without a generator."""

    def __init__(self, dataset, num_replicas, rank):
        self.total, self.count = len(dataset), len(dataset) // num_replicas

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.multinomial(torch.ones(self.total), self.count, True).tolist())


class WeightedSameOnAllRanks(Weighted):
    def __iter__(self):
        return iter(self.draw(self.epoch, len(self)))


class WeightedSeedsOverlap(Weighted):
    def __iter__(self):
        return iter(self.draw(self.epoch + self.rank, len(self)))


class WeightedNoEpoch(WeightedWithSeedsOfRanks):
    def set_epoch(self, epoch):
        pass


whole = functools.partial(RepeatedAugmentation, whole=True)
twice = functools.partial(RepeatedAugmentation, num_repeats=2)
twice.__name__ = "twice"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_comes_again_by_intention_passes(world, world_size):
    case = {"num_samples": 62, "world_size": world_size}
    check_sampler(RepeatedAugmentation, world, repeats=3, **case)
    check_sampler(whole, world, repeats=3, **case)
    check_sampler(twice, world, repeats=2, **case)
    for endless in (Endless, EndlessWithASeedOfAllRanks):
        check_sampler(endless, world, endless=True, **case)
    for weighted in (Weighted, WeightedWithSeedsOfRanks, WeightedFromTheStream):
        check_sampler(weighted, world, repeats=None, **case)


def rows(*cases):
    return pytest.mark.parametrize(("broken", "message"), [pytest.param(*case, id=case[0].__name__) for case in cases])


@rows(
    (AnotherSeed, r"sample \d+ comes \d times, on ranks .*, 3 times on all .*\n.*\n.*must be that of all ranks"),
    (SeedOfTheRank, r"sample \d+ comes \d times, on ranks .*, 3 times on all .*\n.*\n.*must be that of all ranks"),
    (SameOnAllRanks, r"sample \d+ comes \d times, on ranks \[0, 1\], 3 times .*\n.*\n.*all ranks have the same share"),
    (twice, r"sample \d+ comes 2 times, on ranks .*\n.*\n.*come 2 times: repeats=3 is not what the sampler is told"),
    (NoEpoch, r"rank 0 has samples .* in epochs 0 and 1\n.*set_epoch was forgotten"),
    (RoundedDown, r"no rank has a sample\n.*as timm's to 256"),
    (NeverTheLast, r"samples 31, .* come in none of 60 epochs\n"),
    (DistributedSampler, r"sample \d+ comes 1 times, on ranks .*\n.*\n.*come 1 times: repeats=3 is not"),
)
def test_repeated_augmentation_that_is_broken_is_rejected(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^\w+: {message}"):
        check_sampler(broken, world, num_samples=62, world_size=2, repeats=3)


@rows(
    (EndlessSeedOfTheRank, r"sample \d+ is in the shards of ranks \[0, 1\]"),
    (EndlessSameOnAllRanks, r"sample \d+ is in the shards of ranks \[0, 1\].*\n.*\n.*every rank has the whole|.*same"),
    (EndlessSameOrder, r"samples .* \(62 in all\) of all ranks in turn come again after them.*\n.*from one seed again"),
)
def test_streams_without_an_end_that_are_broken_are_rejected(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^\w+: {message}"):
        check_sampler(broken, world, num_samples=62, world_size=2, endless=True)


@pytest.mark.parametrize("num_samples", [61, 62, 63])
def test_a_stream_with_one_order_is_rejected_for_any_number_of_samples(world, num_samples):
    check_sampler(Endless, world, num_samples=num_samples, world_size=3, endless=True)
    with pytest.raises(AssertionError, match=r"of all ranks in turn come again after them, in the same order\n"):
        check_sampler(EndlessSameOrder, world, num_samples=num_samples, world_size=3, endless=True)


def test_a_stream_that_each_rank_begins_anew_is_rejected(world):
    with pytest.raises(AssertionError, match=r"rank 0 has samples .* in epochs 0 and 1\n.*from one seed again"):
        check_sampler(EndlessInBlocks, world, num_samples=61, world_size=2, endless=True)


@rows(
    (WeightedSameOnAllRanks, r"rank 0 has samples .*, as rank 1 has\n.*reaches neither the seed nor"),
    (WeightedSeedsOverlap, r"rank 0 has samples .* in epoch 1, as rank 1 in epoch 0 has\n.*overlap"),
    (WeightedNoEpoch, r"rank 0 has samples .* in epochs 0 and 1\n.*set_epoch was forgotten"),
)
def test_draws_with_replacement_that_are_broken_are_rejected(world, broken, message):
    with pytest.raises(AssertionError, match=rf"^\w+: {message}"):
        check_sampler(broken, world, num_samples=62, world_size=2, repeats=None)


def test_few_draws_with_replacement_are_inconclusive(world):
    with pytest.raises(Inconclusive, match="of fewer than 12 samples ranks may draw the same by chance, got 6"):
        check_sampler(Weighted, world, num_samples=12, world_size=2, repeats=None)


def test_what_to_pass_is_told(world):
    for subject, told in ((RepeatedAugmentation, "pass repeats=3"), (Weighted, "pass repeats=None")):
        with pytest.raises(AssertionError, match="is in the shards of") as caught:
            check_sampler(subject, world, num_samples=62, world_size=2)
        assert caught.value.__notes__[0].endswith(told)
    with pytest.raises(AssertionError, match=r"goes on after 248 samples of 62\n.*pass endless=True"):
        check_sampler(EndlessWithAnEpoch, world, num_samples=62, world_size=2)
    with pytest.raises(ValueError, match="takes repeats as 1 or more, or None for any number, got 0"):
        check_sampler(Weighted, world, num_samples=62, world_size=2, repeats=0)


class EndlessWithAnEpoch(Endless):
    def set_epoch(self, epoch):
        pass
