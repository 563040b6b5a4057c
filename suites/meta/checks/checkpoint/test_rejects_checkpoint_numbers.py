"""check_resume on trainers whose own numbers, such as the epoch, are lost, saved wrongly, or irrelevant."""

from __future__ import annotations

import collections
import itertools
import pickle
import random
import statistics

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pdlcheck.checks import check_resume

DATA = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))


class Trainer:
    """A trainer as in scripts: it holds the model and counts epochs, which decide the order of the samples."""

    def __init__(self):
        torch.manual_seed(0)
        self.model, self.epoch, self.name, self.epochs_of_this_run = nn.Linear(3, 1), 0, "trainer", 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA))

    def run_epoch(self, _):
        self.loader.sampler.set_epoch(self.epoch)
        for (x,) in self.loader:
            self.optimizer.zero_grad()
            (self.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            self.optimizer.step()
        self.epoch += 1
        self.epochs_of_this_run += 1

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}

    def save(self, path):
        if dist.get_rank() == 0:
            torch.save(self.state(), path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]


class OneEpochLess(Trainer):
    """A trainer that saves the number of the epoch before, and therefore repeats an epoch after loading."""

    def state(self):
        return super().state() | {"epoch": self.epoch - 1}


class NoEpoch(Trainer):
    def load(self, path):
        super().load(path)
        self.epoch = 0


class EpochOfItsClass(Trainer):
    """A trainer whose epoch begins as an attribute of the class, and falls back to it after loading."""

    epoch = 0

    def __init__(self):
        super().__init__()
        del self.epoch

    def load(self, path):
        super().load(path)
        del self.epoch


class OneEpochLessAndNoMomentum(OneEpochLess):
    def load(self, path):
        super().load(path)
        self.optimizer.state.clear()


class AnotherOptimizer(Trainer):
    """A trainer whose loading gives the model new parameters, which the optimizer does not update.

    No part that is put back repairs this.
    """

    def load(self, path):
        super().load(path)
        self.epoch = 1
        self.model.load_state_dict({name: w.clone() for name, w in self.model.state_dict().items()}, assign=True)


class AnotherOptimizerInTheRightEpoch(AnotherOptimizer):
    def load(self, path):
        super().load(path)
        self.epoch = 2


def starts(trainer):
    def start():
        one = trainer()
        return one.model, one.run_epoch, one.save, one.load

    return start


def test_a_trainer_that_keeps_its_epoch_and_counts_those_of_a_run_is_right(world):
    check_resume(starts(Trainer), world, saved_after=2, steps=4)


@pytest.mark.parametrize(
    ("trainer", "lost", "evidence"),
    [
        (OneEpochLess, "the numbers of OneEpochLess;", r"the numbers of OneEpochLess\['epoch'\] is 1 instead of 2"),
        (NoEpoch, "the numbers of NoEpoch;", r"the numbers of NoEpoch\['epoch'\] is 0 instead of 2"),
        (EpochOfItsClass, "the numbers of EpochOfItsClass;", r"EpochOfItsClass\['epoch'\] is 0 instead of 2"),
        (
            OneEpochLessAndNoMomentum,
            "the numbers of OneEpochLessAndNoMomentum and optimizer;",
            r"\['epoch'\] is 1 instead of 2; optimizer\['state'\]",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_number_that_was_lost_is_named_with_both_values(world, trainer, lost, evidence):
    words = rf"likely cause  lost: {lost} put back[^\n]*\n  evidence      [^\n]*{evidence}"
    with pytest.raises(AssertionError, match=words):
        check_resume(starts(trainer), world, saved_after=2, steps=4)


def test_where_nothing_heals_it_what_differs_is_shown_all_the_same(world):
    data = "the sampler had epoch 1, and epoch 2 in the run without a stop"
    words = rf"{data}[^\n]*; nothing that is put back makes the training go on exactly\n.*\['epoch'\] is 1 instead of 2"
    with pytest.raises(AssertionError, match=words):
        check_resume(starts(AnotherOptimizer), world, saved_after=2, steps=4)
    words = r"no known cause fits; excluded: \"the weights alone\", .*\n.*\['epochs_of_this_run'\] is 0 instead of 2"
    with pytest.raises(AssertionError, match=words):
        check_resume(starts(AnotherOptimizerInTheRightEpoch), world, saved_after=2, steps=4)


def steps_that_go_by(kind, restored):
    """Return a training whose steps divide the learning rate by a number that depends on the steps before."""

    def start():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        count, counts, log = 0, [0], []
        last, inputs = collections.deque(maxlen=2), collections.deque(maxlen=2)
        schedule = Schedule(optimizer)

        def factor(loss):
            nonlocal count
            if kind == "nonlocal":
                count += 1
                return count
            if kind == "list":
                counts[0] += 1
                return counts[0]
            if kind == "scheduler":
                schedule.taken += 1
                return schedule.taken
            last.append(float(loss))
            return 1 + statistics.mean(last)

        def step(i):
            inputs.append(torch.full((2, 3), i + 1.0))
            optimizer.zero_grad()
            loss = model(torch.cat(list(inputs)) if kind == "tensors" else inputs[-1]).square().mean()
            loss.backward()
            log.append(loss.item())
            optimizer.param_groups[0]["lr"] = 0.1 / (1 if kind == "tensors" else factor(loss.detach()))
            optimizer.step()

        def save(path):
            own = (model.state_dict(), count, counts, list(last), list(inputs), schedule.taken)
            torch.save(own, f"{path}-{dist.get_rank()}")

        def load(path):
            nonlocal count
            state, one, some, numbers, tensors, taken = torch.load(f"{path}-{dist.get_rank()}", weights_only=True)
            model.load_state_dict(state)
            if restored:
                count, counts[:], schedule.taken = one, some, taken
                last.extend(numbers)
                inputs.extend(tensors)

        return model, step, save, load

    return start


class Schedule:
    """A schedule whose state is a number."""

    def __init__(self, optimizer):
        self.optimizer, self.taken = optimizer, 0

    def state_dict(self):
        return self.taken

    def load_state_dict(self, state):
        self.taken = state


HELD = {
    "nonlocal": (r"the numbers of \w+; put back", r"\['count'\] is 0 instead of 3"),
    "list": (r"the numbers in counts; put back", r"the numbers in counts\[0\] is 0 instead of 3"),
    "deque": (r"the numbers in last; put back", r"the numbers in last\[0\] is missing"),
    "tensors": (r"inputs; put back", r"inputs\[0\] is missing"),
    "scheduler": (r"schedule; put back", r"schedule is 0 instead of 3"),
}


@pytest.mark.parametrize("kind", HELD)
def test_numbers_that_functions_and_containers_hold_are_named(world, kind):
    check_resume(steps_that_go_by(kind, True), world)
    lost, evidence = HELD[kind]
    with pytest.raises(AssertionError, match=rf"likely cause  lost: {lost}[^\n]*\n  evidence      [^\n]*{evidence}"):
        check_resume(steps_that_go_by(kind, False), world)


def test_a_log_of_numbers_is_not_what_an_iterator_has_lost(world):
    def start():
        torch.manual_seed(0)
        model, batches, losses = nn.Linear(3, 1), itertools.count(1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            loss = model(torch.full((2, 3), float(next(batches)))).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()

        def save(path):
            torch.save(model.state_dict(), f"{path}-{dist.get_rank()}")

        def load(path):
            model.load_state_dict(torch.load(f"{path}-{dist.get_rank()}", weights_only=True))

        return model, step, save, load

    words = r"likely cause  in steps 4 to 6 the model got the inputs of steps 1 to 3: the data began again; with the st"
    with pytest.raises(AssertionError, match=words):
        check_resume(start, world)


DRAWS = {
    "python": (random.Random, lambda stream: stream.random(), "holds other values"),
    "numpy": (np.random.default_rng, lambda stream: stream.random(), r"is \d+ instead of \d+"),
    "older numpy": (
        np.random.RandomState,
        lambda stream: stream.rand(),
        r"\['pos'\] is \d+ instead of \d+|other values",
    ),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_streams_of_the_program_s_own_are_named(world, kind):
    make, draw, shown = DRAWS[kind]

    def start(restores=True):
        torch.manual_seed(0)
        model, noise = nn.Linear(2, 1), make(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            model(torch.full((1, 2), draw(noise))).square().mean().backward()
            optimizer.step()

        def save(path):
            torch.save([model.state_dict(), pickle.dumps(noise)], f"{path}-{dist.get_rank()}")

        def load(path):
            nonlocal noise
            weights, held = torch.load(f"{path}-{dist.get_rank()}", weights_only=True)
            model.load_state_dict(weights)
            noise = pickle.loads(held) if restores else noise

        return model, step, save, load

    check_resume(start, world)
    words = rf"cause  lost: the numbers that noise draws; put back[^\n]*\n  evidence      [^\n]*{shown}"
    with pytest.raises(AssertionError, match=words):
        check_resume(lambda: start(restores=False), world)
