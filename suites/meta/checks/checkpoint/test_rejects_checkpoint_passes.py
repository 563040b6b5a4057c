"""check_resume on trainings that stop within a pass over the data, and begin one pass more after loading."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pdlcheck.checks import check_resume

DATA = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))


class Trainer:
    """A trainer that resumes with the next batch.

    Its loader draws a seed when a pass begins, and its dropout draws at each step.
    """

    generator = None

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = DataLoader(DATA, batch_size=4, generator=self.generator and self.generator())
        self.taken, self.batches = 0, None
        torch.manual_seed(1 + dist.get_rank())

    def all_batches(self, skip):
        while True:
            for place, (x,) in enumerate(self.loader):
                if place >= skip:
                    yield x
            skip = 0

    def step(self, _):
        if self.batches is None:
            self.batches = self.all_batches(self.taken % len(self.loader))
        x = next(self.batches)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.taken += 1

    def save(self, path):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "taken": self.taken}
        torch.save(state | {"numbers": torch.get_rng_state()}, f"{path}-{dist.get_rank()}")

    def load(self, path):
        state = torch.load(f"{path}-{dist.get_rank()}", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.load_optimizer(state["optimizer"])
        self.taken = state["taken"]
        self.restore(state["numbers"])

    def load_optimizer(self, state):
        self.optimizer.load_state_dict(state)

    def restore(self, numbers):
        torch.set_rng_state(numbers)


class GeneratorOfItsOwn(Trainer):
    generator = torch.Generator


class RestoresOnceTheIteratorIsThere(Trainer):
    def restore(self, numbers):
        first = self.all_batches(self.taken % len(self.loader))
        batch = next(first)

        def again():
            yield batch
            yield from first

        self.batches = again()
        torch.set_rng_state(numbers)


class NoMomentum(Trainer):
    def load_optimizer(self, state):
        pass


class RestoresNothing(GeneratorOfItsOwn):
    def restore(self, numbers):
        pass


def starts(trainer):
    def start():
        one = trainer()
        return one.model, one.step, one.save, one.load

    return start


CASE = {"saved_after": 3, "steps": 9}
SEED = "the seed that a DataLoader draws from the random numbers of torch when a pass begins: one more begins after"


@pytest.mark.parametrize("trainer", [GeneratorOfItsOwn, RestoresOnceTheIteratorIsThere])
def test_a_pass_that_begins_once_more_may_draw_elsewhere_or_earlier(world, trainer):
    check_resume(starts(trainer), world, **CASE)


@pytest.mark.parametrize(
    ("trainer", "cause"),
    [
        (Trainer, rf"{SEED} loading; restore them .*; with that seed drawn elsewhere, the training goes on exactly\n"),
        (NoMomentum, rf"lost: optimizer; and {SEED} loading; .*; with both put right, the training goes on exactly\n"),
        (RestoresNothing, r"lost: the random numbers of torch; put back from the run without a stop, the training "),
    ],
)
def test_the_seed_of_one_more_pass_is_told(world, trainer, cause):
    with pytest.raises(AssertionError, match=rf"\n  likely cause  {cause}"):
        check_resume(starts(trainer), world, **CASE)


class Loader:
    """A loader that has a state within a pass only, and therefore begins a pass when its state is read."""

    def __init__(self):
        self.epoch, self.skip, self.current = 0, 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def begin(self):
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.current, self.skip = order[self.skip :], 0

    def next_batch(self):
        if self.current is None:
            self.begin()
        batch, self.current = self.current[:2], self.current[2:] or None
        return batch

    def state_dict(self):
        if self.current is None:
            self.begin()
        return {"used": 20 - len(self.current)}

    def load_state_dict(self, state):
        self.skip, self.current = state["used"], None


def begins_a_pass_when_asked(remembers):
    """Return a training that resumes within a pass; with ``remembers=False`` it loses the epoch."""
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, epoch = Loader(), {"epoch": 0, "begun": False}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)

    def step(_):
        if not epoch["begun"]:
            loader.set_epoch(epoch["epoch"])
            epoch["begun"] = True
        x = torch.tensor(loader.next_batch(), dtype=torch.float64).view(-1, 1) / 20
        if loader.current is None:
            epoch.update(epoch=epoch["epoch"] + 1, begun=False)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def save(path):
        state = {"model": model.state_dict(), "epoch": epoch["epoch"], "loader": loader.state_dict()}
        torch.save(state, f"{path}-{dist.get_rank()}")

    def load(path):
        state = torch.load(f"{path}-{dist.get_rank()}", weights_only=True)
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
        epoch["epoch"] = state["epoch"] if remembers else 0

    return model, step, save, load


def test_what_looking_does_to_a_loader_is_not_what_a_stop_does(world):
    check_resume(lambda: begins_a_pass_when_asked(True), world, saved_after=13, steps=17)
    with pytest.raises(AssertionError, match="resumed after step 13, rank 0 after step 14 holds"):
        check_resume(lambda: begins_a_pass_when_asked(False), world, saved_after=13, steps=17)


class SaysNothing(torch.optim.SGD):
    """An optimizer whose state is not available, as that of a sharded optimizer before it is consolidated."""

    def state_dict(self):
        raise RuntimeError("call consolidate() first\nor else")


def test_what_could_not_be_looked_at_is_told(world):
    def start():
        model = nn.Linear(1, 1)
        optimizer = SaysNothing(model.parameters(), lr=0.1, momentum=0.9)

        def step(i):
            optimizer.zero_grad()
            model(torch.full((1, 1), i + 1.0)).square().mean().backward()
            optimizer.step()

        def save(path):
            torch.save(model.state_dict(), f"{path}-{dist.get_rank()}")

        def load(path):
            model.load_state_dict(torch.load(f"{path}-{dist.get_rank()}", weights_only=True))

        return model, step, save, load

    with pytest.raises(AssertionError) as error:
        check_resume(start, world)
    told = "optimizer could not be looked at, its state_dict() raises RuntimeError: call consolidate() first\n"
    assert told in str(error.value), str(error.value)


class CountsWhatItDraws:
    """A sampler that starts at a position, and counts the samples that it has drawn in this run."""

    def __init__(self):
        self.start = self.drawn = self.epoch = 0

    def __iter__(self):
        order = torch.randperm(len(DATA), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for sample in order[self.start :]:
            self.drawn += 1
            yield sample
        self.start, self.epoch = 0, self.epoch + 1

    def __len__(self):
        return len(DATA)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class FetchesAhead(Trainer):
    """A trainer that saves what it has used, while its sampler has drawn two batches more."""

    lost = ()

    def __init__(self):
        super().__init__()
        self.sampler = CountsWhatItDraws()
        self.loader = DataLoader(DATA, batch_size=4, sampler=self.sampler, generator=torch.Generator())

    def all_batches(self, _):
        while True:
            ahead = []
            for (x,) in self.loader:
                ahead.append(x)
                if len(ahead) > 2:
                    yield ahead.pop(0)
            yield from ahead

    def load(self, path):
        super().load(path)
        used = {"start": self.taken % 5 * 4, "epoch": self.taken // 5}
        self.sampler.load_state_dict({key: value for key, value in used.items() if key not in self.lost})


class LosesTheEpoch(FetchesAhead):
    lost = ("epoch",)


class LosesThePosition(FetchesAhead):
    lost = ("start",)


@pytest.mark.parametrize("saved_after", [3, 8])
def test_a_sampler_may_count_what_is_fetched_ahead(world, saved_after):
    check_resume(starts(FetchesAhead), world, saved_after=saved_after, steps=saved_after + 4)


@pytest.mark.parametrize("trainer", [LosesTheEpoch, LosesThePosition])
def test_what_decides_the_samples_is_no_count(world, trainer):
    with pytest.raises(AssertionError, match=r"resumed after step 8, rank 0 after step 9 holds"):
        check_resume(starts(trainer), world, saved_after=8, steps=12)
