"""The checks of samplers reject broken ones, name the cause, and accept the correct twin."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from pdlcheck.checks import check_sampler, check_sampler_resumes
from pdlcheck.errors import Inconclusive


class Right:
    """A sampler with strided shards of an order that is drawn from the epoch.

    Its position counts the samples of all ranks.
    """

    def __init__(self, dataset, num_replicas, rank):
        self.total, self.num_replicas, self.rank = len(dataset), num_replicas, rank
        self.epoch, self.start, self.used = 0, 0, 0

    def order(self):
        return torch.randperm(self.total, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __iter__(self):
        return iter(self.order()[self.start :][self.rank :: self.num_replicas])

    def __len__(self):
        return len(range(self.start + self.rank, self.total, self.num_replicas))

    def set_epoch(self, epoch):
        if epoch != self.epoch:
            self.epoch, self.start, self.used = epoch, 0, 0

    def commit(self, num_samples):
        self.used += num_samples

    def state_dict(self):
        return {"epoch": self.epoch, "start": self.start + self.used * self.num_replicas}

    def load_state_dict(self, state):
        self.epoch, self.start, self.used = state["epoch"], state["start"], 0


class LongerThanItSays(Right):
    def __len__(self):
        return self.total // self.num_replicas


class GoesOnDrawing(Right):
    """A sampler that draws the first pass from the epoch, and the second from the same stream."""

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        if not hasattr(self, "stream") or epoch != self.drawn:
            self.stream, self.drawn = torch.Generator().manual_seed(epoch), epoch

    def order(self):
        return torch.randperm(self.total, generator=self.stream).tolist()


class InOneOrder(Right):
    def order(self):
        return list(range(self.total))


class IgnoresTheEpoch(Right):
    def order(self):
        return torch.randperm(self.total, generator=torch.Generator().manual_seed(0)).tolist()


class WithoutTheTail(Right):
    def order(self):
        return super().order()[: self.total // self.num_replicas * self.num_replicas]


class DropsBeforeItDraws(Right):
    def order(self):
        kept = self.total // self.num_replicas * self.num_replicas
        return torch.randperm(kept, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self):
        return self.total // self.num_replicas


class OwnOrder(Right):
    def order(self):
        return torch.randperm(self.total, generator=torch.Generator().manual_seed(self.epoch + self.rank)).tolist()


class ForgetsThePosition(Right):
    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class ResetsInSetEpoch(Right):
    """A sampler that loads its position, and loses it in ``set_epoch``."""

    def set_epoch(self, epoch):
        self.epoch, self.start, self.used = epoch, 0, 0


class NeedsSetEpoch(ResetsInSetEpoch):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = None


class FromTheEnd(Right):
    """A sampler that reverses the remaining samples after a stop."""

    def order(self):
        used, left = super().order()[: self.start], super().order()[self.start :]
        return used + (left[::-1] if used else left)


class CountsWhatIsFetched(Right):
    def __iter__(self):
        for sample in super().__iter__():
            self.used += 1
            yield sample

    def commit(self, num_samples):
        pass


class OneTooFar(Right):
    def state_dict(self):
        return {"epoch": self.epoch, "start": self.start + (self.used + 1) * self.num_replicas}


class TwoTooFew(Right):
    def state_dict(self):
        return {"epoch": self.epoch, "start": self.start + (self.used - 2) * self.num_replicas}


class CountsItsOwnSamples(Right):
    def state_dict(self):
        return {"epoch": self.epoch, "start": self.start + self.used}


class ForgetsTheEpoch(Right):
    """A sampler that does not load the epoch.

    A loop that sets the epoch hides this, but it also resets the position.
    """

    def load_state_dict(self, state):
        self.start, self.used = state["start"], 0


class InBlocks(Right):
    """A sampler with blocks, whose position is that of one rank; another number of ranks makes other blocks."""

    def __iter__(self):
        size = -(-self.total // self.num_replicas)
        return iter(self.order()[self.rank * size : (self.rank + 1) * size][self.start :])

    def state_dict(self):
        return {"epoch": self.epoch, "start": self.start + self.used}


class HasTwoSamplesTwice(Right):
    """A sampler that gives its first two samples again, instead of the last two; its position is right."""

    def order(self):
        order = super().order()
        return order[:-2] + order[:2]


class WithoutTheLastTwo(Right):
    """A sampler that leaves out the last two samples of its order; its position is right."""

    def order(self):
        return super().order()[:-2]


class SeedOfRank0(Right):
    """A sampler whose seed rank 0 draws and broadcasts; ``seed`` is part of the state."""

    def __init__(self, dataset, num_replicas, rank):
        super().__init__(dataset, num_replicas, rank)
        seed = torch.tensor(self.draw())
        dist.broadcast(seed, 0)
        self.seed = int(seed)

    def draw(self):
        return 1

    def order(self):
        return torch.randperm(self.total, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()

    def state_dict(self):
        return super().state_dict() | {"seed": self.seed}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.seed = state["seed"]


class SeedOfTorch(SeedOfRank0):
    def draw(self):
        return int(torch.randint(2**20, ()))


class SeedOfPython(SeedOfRank0):
    def draw(self):
        return random.randrange(2**20)


class SeedOfNumpy(SeedOfRank0):
    def draw(self):
        return int(np.random.randint(2**20))


class SeedThatIsNotSaved(SeedOfNumpy):
    def load_state_dict(self, state):
        super().load_state_dict(state | {"seed": self.seed})


class OrderOfNumpy(Right):
    """A sampler whose orders rank 0 draws from the global stream."""

    def order(self):
        order = torch.from_numpy(np.random.permutation(self.total))
        dist.broadcast(order, 0)
        return order.tolist()


class OrderOfTheSystem(OrderOfNumpy):
    def order(self):
        order = torch.tensor(random.SystemRandom().sample(range(self.total), self.total))
        dist.broadcast(order, 0)
        return order.tolist()


class TwoOrders(Right):
    def set_epoch(self, epoch):
        super().set_epoch(epoch % 2)


def rows(*cases):
    return pytest.mark.parametrize(("broken", "message"), [pytest.param(*case, id=case[0].__name__) for case in cases])


def test_check_sampler_accepts(world):
    check_sampler(Right, world, num_samples=38, world_size=3, tail="uneven")
    check_sampler(DistributedSampler, world, num_samples=38, world_size=3)
    check_sampler(SeedOfRank0, world, num_samples=38, world_size=3, tail="uneven")


@rows(
    (LongerThanItSays, r"in epoch 0 len\(\) of rank 0 is 12, it gives 13 samples"),
    (GoesOnDrawing, r"asked again in epoch 0, rank 0 gives samples .*, it gave samples .*\n.*a stream that goes on"),
    (InOneOrder, r"rank 0 has samples .* in epochs 0 and 1\n.*in the order of the data set: nothing is shuffled"),
    (IgnoresTheEpoch, r"rank 0 has samples .* in epochs 0 and 1\n.*set_epoch was forgotten"),
    (WithoutTheTail, r"samples \d+, \d+ in no shard, .* cover all 38\n.*the tail is dropped: pass tail='drop'"),
    (TwoOrders, r"rank 0 has samples .* in epochs 0 and 2\n.*the order comes again after 2 epochs: the number that"),
    (SeedOfTorch, r"rank 0 has .* when epoch 1 is drawn again, .*\n.*epoch: on the random numbers of torch; training"),
    (SeedOfPython, r"rank 0 has .* when epoch 1 is drawn again, .*\n.*epoch: on the random numbers of Python; train"),
    (SeedOfNumpy, r"rank 0 has .* when epoch 1 is drawn again, .*\n.*epoch: on the random numbers of numpy; training"),
    (OrderOfNumpy, r"rank 0 has .* when epoch 1 is drawn again, .*\n.*epoch: on the random numbers of numpy; train"),
    (OrderOfTheSystem, r"rank 0 has .* when epoch 1 is drawn again, .*\n.*more than seed and epoch; training cannot"),
    (OwnOrder, r"sample \d+ is in the shards of ranks .*, shards must be disjoint"),
)
def test_check_sampler_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_sampler(broken, world, num_samples=38, world_size=3, tail="uneven")


def test_what_is_dropped_of_a_shuffled_order_is_not_the_same_for_ever(world):
    dropping = functools.partial(DistributedSampler, drop_last=True)
    check_sampler(dropping, world, num_samples=38, world_size=3, tail="drop")
    check_sampler(dropping, world, num_samples=5, world_size=3, tail="drop")
    for num_samples, lost in ((38, "samples 36, 37"), (5, "samples 3, 4")):
        with pytest.raises(AssertionError, match=f"^DropsBeforeItDraws: {lost} come in none of 20 epochs\n.*the tail"):
            check_sampler(DropsBeforeItDraws, world, num_samples=num_samples, world_size=3, tail="drop")
    check_sampler(DropsBeforeItDraws, world, num_samples=5, world_size=3, tail="drop", shuffle=False)


@pytest.mark.parametrize("world_sizes", [(2, 2), (2, 3), (3, 1)])
def test_check_sampler_resumes_accepts(world, world_sizes):
    check_sampler_resumes(Right, world, num_samples=20, world_sizes=world_sizes, tail="uneven")


def test_check_sampler_resumes_accepts_a_random_seed_that_is_saved(world):
    check_sampler_resumes(SeedOfNumpy, world, num_samples=20, tail="uneven")


def test_check_sampler_resumes_accepts_blocks_while_ranks_stay_as_many(world):
    check_sampler_resumes(InBlocks, world, num_samples=20, world_sizes=(2, 2), tail="uneven")


@rows(
    (ForgetsThePosition, "resumed, rank 0 gives .*, the undisturbed run gives .*\n[\\s\\S]*the epoch begins anew"),
    (CountsWhatIsFetched, "resumed, rank 0 gives .*\n[\\s\\S]*counts what the loader fetched ahead"),
    (OneTooFar, r"resumed, rank 0 gives .*\n[\s\S]*cause  each rank goes on a sample too late: never used\n"),
    (
        TwoTooFew,
        r"resumed, rank 0 gives .*\n[\s\S]*cause  each rank goes on 2 of its samples too early: used once more",
    ),
    (
        CountsItsOwnSamples,
        r"resumed, rank 0 gives .*\n.*used before .*\n  likely cause  no known cause fits; .*\n  case",
    ),
    (ForgetsTheEpoch, r"resumed, rank 0 gives .*\n[\s\S]*the epoch begins anew: it is not part of the state"),
    (ResetsInSetEpoch, r"resumed, rank 0 gives .*\n[\s\S]*cause  set_epoch\(\) loses the position that was loaded"),
    (NeedsSetEpoch, r"resumed, rank 0 gives .*\n.*used before .*\n  likely cause  no known cause fits; .*\n  case"),
    (SeedThatIsNotSaved, r"resumed, rank 0 gives .*\n.*\n.*is drawn from global random numbers, and is not part of"),
    (FromTheEnd, r"resumed, rank 0 gives .*\n[\s\S]*the samples that are left come in another order"),
    (HasTwoSamplesTwice, r"after the stop .*\n.*\n.*cause  they come again without this stop, too"),
    (WithoutTheLastTwo, r"samples .* never come .*\n.*cause  they do not come without this stop either"),
)
def test_check_sampler_resumes_rejects(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_sampler_resumes(broken, world, num_samples=20, world_sizes=(2, 2), tail="uneven")


@rows(
    (InBlocks, r"after the stop samples .* come again, or twice\n.*0 allowed\n.*not that of all ranks together"),
    (CountsItsOwnSamples, r"after the stop samples .* come again, or twice"),
    (ForgetsThePosition, r"after the stop .*\n.*\n.*cause  the state has no position, or it is not loaded"),
    (ForgetsTheEpoch, r"after the stop .*\n.*\n.*cause  the epoch begins anew: it is not part of the state"),
    (ResetsInSetEpoch, r"after the stop .*\n.*\n.*cause  set_epoch\(\) loses the position that was loaded"),
    (CountsWhatIsFetched, r"samples .* never come after the stop, training had not used them"),
)
def test_check_sampler_resumes_rejects_on_another_number_of_ranks(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_sampler_resumes(broken, world, num_samples=20, world_sizes=(2, 3), tail="uneven")


def test_check_sampler_resumes_needs_samples_on_both_sides_of_the_stop(world):
    for num_samples, used in ((6, 3), (6, 0)):
        with pytest.raises(Inconclusive, match=f"nothing is left after stop 0, .* of {num_samples} were used"):
            check_sampler_resumes(Right, world, num_samples=num_samples, used=(used,), tail="uneven")
    with pytest.raises(ValueError, match="needs one leg more than stops, got 2 and 2"):
        check_sampler_resumes(Right, world, num_samples=20, used=(1, 1))


class InOrder:
    """A sampler with one fixed order, and therefore without ``set_epoch``."""

    def __init__(self, dataset, num_replicas, rank):
        self.indices = list(range(len(dataset)))
        self.indices += self.indices[: -len(dataset) % num_replicas]
        self.indices = self.indices[rank::num_replicas]

    def __len__(self):
        return len(self.indices)

    def __iter__(self):
        return iter(self.indices)


def test_a_sampler_that_keeps_one_order_needs_no_set_epoch(world):
    check_sampler(InOrder, world, num_samples=25, world_size=2, shuffle=False)
    with pytest.raises(TypeError, match=r"a InOrder, has no set_epoch, .*; pass shuffle=False if it keeps one order"):
        check_sampler(InOrder, world, num_samples=25, world_size=2)


class InWholeBatches(Right):
    """A sampler that pads until each rank has whole batches of 4.

    It pads with the first samples of the order, or with those of the rank.
    """

    own = False

    def __iter__(self):
        order = self.order()
        if self.own:
            order += order[: -len(order) % self.num_replicas]
            mine = order[self.rank :: self.num_replicas]
            return iter(mine + mine[: -len(mine) % 4])
        return iter((order + order[: -len(order) % (4 * self.num_replicas)])[self.rank :: self.num_replicas])

    def __len__(self):
        return -(-self.total // (4 * self.num_replicas)) * 4


class FilledUpByEachRank(InWholeBatches):
    own = True


class FilledUpToLarger(InWholeBatches):
    def __iter__(self):
        order = self.order()
        return iter((order + order[: -len(order) % (8 * self.num_replicas)])[self.rank :: self.num_replicas])


@pytest.mark.parametrize("sampler", [InWholeBatches, FilledUpByEachRank])
def test_a_sampler_that_fills_up_whole_batches_is_right_if_that_is_meant(world, sampler):
    case = {"num_samples": 53, "world_size": 3}
    check_sampler(sampler, world, dealt_in=4, **case)
    told = r"all samples come, 7 of them again, .* pass dealt_in=, the samples in one, such as 4; if not"
    with pytest.raises(AssertionError, match=told) as error:
        check_sampler(sampler, world, **case)
    assert not any("replacement" in note for note in getattr(error.value, "__notes__", []))
    with pytest.raises(AssertionError, match=r"19 samples more than there are, 7 allowed\n"):
        check_sampler(FilledUpToLarger, world, dealt_in=4, **case)


def test_samples_in_a_batch_are_one_or_more_and_of_an_epoch(world):
    for more in ({"dealt_in": 0}, {"dealt_in": 4, "endless": True}):
        with pytest.raises(ValueError, match="takes dealt_in as the samples in a batch, 1 or more, and only where"):
            check_sampler(InWholeBatches, world, num_samples=53, world_size=3, **more)
