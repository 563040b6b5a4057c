"""check_resume on trainings that resume with other data: it states which data the steps read, and why."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from pdlcheck.checks import check_resume
from pdlcheck.compat.torch.loaders import NEXT_SAMPLES, Pass

from .loader_trainers import DATA, SkipsInEpoch0, Trainer, rank


class BeginsAgain(Trainer):
    def restore(self, state):
        super().restore(state)
        self.place = 0


class SkipsTooMany(Trainer):
    def restore(self, state):
        super().restore(state)
        self.place += 1


class SkipsTooFew(Trainer):
    def restore(self, state):
        super().restore(state)
        self.place -= 1


class NoEpoch(Trainer):
    def restore(self, state):
        super().restore(state)
        self.epoch = 0


class Shuffles(Trainer):
    def make_loader(self):
        return DataLoader(DATA[rank() :: 2], batch_size=4, shuffle=True, generator=self.generator)

    def set_epoch(self):
        pass


class LosesTheGenerator(Shuffles):
    def restore(self, state):
        super().restore(state | {"generator": self.generator.get_state()})


class SeededByItsEpoch(RandomSampler):
    """A sampler whose generator has a state that does not matter, because each pass seeds it."""

    def __iter__(self):
        self.generator.manual_seed(self.epoch)
        yield from super().__iter__()

    def set_epoch(self, epoch):
        self.epoch = epoch


class SeedsByItsEpoch(Trainer):
    def make_loader(self):
        share = DATA[rank() :: 2]
        self.sampler = SeededByItsEpoch(share, generator=torch.Generator())
        return DataLoader(share, batch_size=4, sampler=self.sampler, generator=self.generator)


class SeedsByItsEpochAndSkipsTooFew(SeedsByItsEpoch):
    def restore(self, state):
        super().restore(state | {"place": state["place"] - 1})


class OneRankBeginsAgain(Trainer):
    def restore(self, state):
        super().restore(state)
        self.place *= 1 - rank()


class Noisy(Dataset):
    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        return DATA[index] + torch.rand(3)


class Augments(Trainer):
    num_workers = 1

    def make_loader(self):
        self.sampler = DistributedSampler(DATA)
        own = {"num_workers": self.num_workers, "generator": self.generator}
        return DataLoader(Noisy(), batch_size=4, sampler=self.sampler, **own)


class LosesTheSeedOfWorkers(Augments):
    def restore(self, state):
        super().restore(state | {"generator": torch.Generator().manual_seed(8).get_state()})


class AugmentsItself(Augments):
    """A trainer whose data set draws from torch's random numbers, which are restored after the batches are skipped."""

    num_workers, numbers = 0, None

    def begin(self):
        batches = super().begin()
        if self.numbers is not None:
            torch.set_rng_state(self.numbers)
        self.numbers = None
        return batches

    def restore(self, state):
        super().restore(state)
        self.numbers = state["numbers"]


class LosesTheNumbers(AugmentsItself):
    def restore(self, state):
        super().restore(state | {"numbers": torch.get_rng_state()})


class OwnOrder(Trainer):
    """A trainer without a loader, whose ranks begin at different places."""

    def __init__(self):
        super().__init__()
        self.place = 4 * rank()

    def next_batch(self):
        self.place += 1
        return DATA[2 * self.place - 2 : 2 * self.place]


class OwnOrderBeginsAgain(OwnOrder):
    def restore(self, state):
        super().restore(state | {"place": 4 * rank()})


class PlaceOfRank0(OwnOrder):
    def restore(self, state):
        super().restore(state)
        self.place -= 4 * rank()


class FetchesAhead(Trainer):
    """A trainer that fetches one batch ahead, so that steps do not use the batches that they fetch."""

    lost = 0

    def __init__(self):
        super().__init__()
        self.stream = self.ahead()

    def ahead(self):
        waiting = []
        while True:
            waiting += [super(FetchesAhead, self).next_batch() for _ in range(2 - len(waiting))]
            yield waiting.pop(0)

    def next_batch(self):
        return next(self.stream)

    def restore(self, state):
        super().restore(state | {"place": state["place"] - 1 - self.lost})


class FetchesAheadAndSkipsTooFew(FetchesAhead):
    lost = 1


class FetchesAheadWithoutMomentum(FetchesAhead):
    def restore(self, state):
        super().restore(state)
        self.optimizer.state.clear()


class FetchesAheadWithNoise(FetchesAhead):
    noise = 1.0

    def restore(self, state):
        super().restore(state)
        torch.manual_seed(3)


class FetchesAheadUntilTheStop(Trainer):
    """A trainer that fetches its first batch when it is made, and does not fetch ahead after a stop."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.stream = self.ahead([super().next_batch()])

    def ahead(self, waiting):
        while True:
            waiting.append(super().next_batch())
            yield waiting.pop(0)

    def next_batch(self):
        return next(self.stream)

    def restore(self, state):
        super().restore(state | {"place": state["place"] - 1})
        self.stream, self.batches = self.ahead([]), None


class FetchesAheadUntilTheStopWithoutMomentum(FetchesAheadUntilTheStop):
    def restore(self, state):
        super().restore(state)
        self.optimizer.state.clear()


class NoMomentum(Trainer):
    def restore(self, state):
        super().restore(state)
        self.optimizer.state.clear()


class Noise(Trainer):
    noise = 1.0


class OtherNoise(Noise):
    def restore(self, state):
        super().restore(state)
        torch.manual_seed(3)


class ReadsFirst(Noise):
    """A trainer that reads its next batch while it loads."""

    def restore(self, state):
        super().restore(state)
        self.batches = self.begin()
        torch.set_rng_state(state["numbers"])


FIRST = {"saved_after": 1, "steps": 2}
WITHIN, SECOND = {"saved_after": 2, "steps": 6}, {"saved_after": 6, "steps": 9}  # of a pass
FIRST_EPOCH = "in step 7 the sampler had epoch 0, and epoch 1 in the run without a stop; set_epoch is not called with"
SHUFFLED = (
    "the generator that shuffles was in another state when the pass began, that of the pass that began in step 1 "
    "without a stop; its state at the start of the pass was not saved, or not restored"
)
OTHER_SEED = (
    "step 2 got the samples of the run without a stop, with other values: the workers of the loader drew from another "
    "seed; the generator that gives it, of the loader or of torch, was in another state when the pass began"
)
OF_RANK_0 = (
    "rank 1 got the state that rank 0 saved: each rank needs its own; resumed, on rank 1, in steps 3 to 6 the model "
    "got the inputs of steps 3 to 6 of rank 0: the position in the data, or the seed, of rank 0 was restored on rank 1"
)
STEPS = "with the steps before the stop taken before loading, the training goes on exactly"
OTHER_DATA = [
    (BeginsAgain, WITHIN, "resumed, steps 3 to 6 got the batches of steps 1 to 4: the loader began its pass again"),
    (SkipsTooMany, WITHIN, "resumed, steps 3 to 5 got the batches of steps 4 to 6: resuming skips 1 batch too many"),
    (SkipsTooFew, WITHIN, "resumed, steps 3 to 6 got the batches of steps 2 to 5: resuming skips 1 batch too few"),
    (SkipsInEpoch0, SECOND, f"steps 7 to 8 got the batches of steps 3 to 4: {FIRST_EPOCH}"),
    (NoEpoch, SECOND, f"resumed, steps 7 to 9 got the batches of steps 3 to 5: {FIRST_EPOCH}"),
    (LosesTheGenerator, SECOND, f"steps 7 to 9 got the batches of steps 3 to 5: {SHUFFLED}; {STEPS}; also not restor"),
    (
        SeedsByItsEpochAndSkipsTooFew,
        SECOND,
        "steps 7 to 9 got the batches of steps 6 to 8: resuming skips 1 batch too f",
    ),
    (OneRankBeginsAgain, WITHIN, "resumed, on rank 1, steps 3 to 6 got the batches of steps 1 to 4: the loader began"),
    (LosesTheSeedOfWorkers, FIRST, OTHER_SEED),
    (LosesTheNumbers, WITHIN, "step 3 got the samples of the [^\n]* with other values: the data set, or collate_fn, "),
    (OwnOrderBeginsAgain, WITHIN, "resumed, in steps 3 to 6 the model got the inputs of steps 1 to 4: the data began"),
    (PlaceOfRank0, WITHIN, OF_RANK_0),
    (
        FetchesAheadAndSkipsTooFew,
        WITHIN,
        "steps 3 to 6 got the batches of steps 2 to 5: resuming skips 1 batch too few",
    ),
]


@pytest.mark.parametrize(("trainer", "how", "cause"), OTHER_DATA, ids=lambda value: getattr(value, "__name__", ""))
def test_other_data_are_named_with_their_reason(world, trainer, how, cause):
    with pytest.raises(AssertionError, match=rf"\n  likely cause  [^\n]*{cause}"):
        check_resume(trainer.start, world, **how)


RIGHT = [Trainer, Shuffles, Augments, AugmentsItself, OwnOrder, FetchesAhead, FetchesAheadUntilTheStop]


@pytest.mark.parametrize("trainer", [*RIGHT, Noise, ReadsFirst])
def test_a_trainer_that_resumes_with_its_data_passes(world, trainer):
    check_resume(trainer.start, world, **(FIRST if trainer is Augments else WITHIN))


@pytest.mark.parametrize(
    ("trainer", "lost"),
    [
        (NoMomentum, "optimizer"),
        (FetchesAheadWithoutMomentum, "optimizer"),
        (FetchesAheadUntilTheStopWithoutMomentum, "optimizer"),
        (OtherNoise, "the random numbers of torch"),
        (FetchesAheadWithNoise, "the random numbers of torch"),
    ],
)
def test_nothing_is_said_of_data_that_are_the_same(world, trainer, lost):
    words = rf"likely cause  lost: {lost}; put back from the run without a stop, the training goes on exactly\n"
    with pytest.raises(AssertionError, match=words):
        check_resume(trainer.start, world, **WITHIN)


def test_loaders_are_as_before_after_a_failure(world):
    before = DataLoader.__iter__, Pass.__next__, getattr(Pass, NEXT_SAMPLES.attribute)
    with pytest.raises(AssertionError, match="the loader began its pass again"):
        check_resume(BeginsAgain.start, world, **WITHIN)
    assert before == (DataLoader.__iter__, Pass.__next__, getattr(Pass, NEXT_SAMPLES.attribute))
    assert not hasattr(DataLoader.__iter__, "__wrapped__")
