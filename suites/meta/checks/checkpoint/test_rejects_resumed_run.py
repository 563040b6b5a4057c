"""check_resumed_run rejects programs with a loop of their own that lose something at a stop."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.checks import check_resumed_run
from pdlcheck.errors import CheckFailed, Inconclusive
from pdlcheck.seen_conditions import listening

STEPS = 4
DATA = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


class Program:
    """A data-parallel program of two epochs, which writes one file for each rank when it stops."""

    loses: tuple[str, ...] = ()
    rank_0_saves_for_all = False

    def __init__(self, folder):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.losses, self.taken = [], 0
        self.file = folder / f"rank-{0 if self.rank_0_saves_for_all else dist.get_rank()}.pt"

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def resume(self):
        if not self.file.exists():
            return
        state = torch.load(self.file)
        for name, part in self.parts().items():
            if name not in self.loses:
                part.load_state_dict(state[name])
        if "scheduler" in self.loses:
            self.optimizer.param_groups[0]["lr"] = 0.1
        self.taken = 0 if "steps" in self.loses else state["taken"]
        if "random" not in self.loses:
            torch.set_rng_state(state["random"])

    def save(self):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        if not self.rank_0_saves_for_all or dist.get_rank() == 0:
            torch.save(state | {"taken": self.taken, "random": torch.get_rng_state()}, self.file)
        dist.barrier()

    def batch(self):
        first = 0 if "position" in self.loses else self.begins_at
        return DATA[4 * ((self.taken - self.begins_at + first) % 3) + 12 * (dist.get_rank() % 2) :][:4]

    def train(self, stop_after):
        self.begins_at = self.taken
        while self.taken < (stop_after or STEPS):
            self.optimizer.zero_grad()
            loss = (self.model(self.batch()) - 1).square().mean()
            loss.backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(loss.item())
            self.taken += 1

    def returned(self):
        return self.parts() | {"losses": self.losses}

    @classmethod
    def run(cls, folder, stop_after):
        program = cls(folder)
        torch.manual_seed(7 + dist.get_rank() if not folder.name.startswith("x") else 0)
        program.resume()
        program.train(stop_after)
        program.save()
        return program.returned()


def broken(program=Program, **changes):
    return type("Broken", (program,), changes).run


def cause_of(run, world, **more):
    with pytest.raises(CheckFailed, match=r"^run: stopped after ") as caught:
        check_resumed_run(run, world, **{"stop_after": 2, **more})
    return caught.value


def test_a_program_that_saves_everything_passes(world):
    check_resumed_run(Program.run, world, stop_after=2)


LOST = {
    "model": "begins with what a new model has as parameter '0.weight' and 3 more of rank",
    "optimizer": "lost: the state of the optimizer (SGD) and the settings of the optimizer; put back",
    "scheduler": "lost: the settings of the optimizer; put back from the run without a stop, the training ends alike;",
    "random": "lost: the random numbers of torch; put back from the run without a stop, the training ends alike",
    "position": "in step 3, the model is given the data of step 1: the data begin anew, and those that were taken",
}
EVIDENCE = {
    "scheduler": "lr is 0.1 in step 3 instead of 0.05",
    "optimizer": "the state of parameter '0.weight' is empty; lr is 0.1 in step 3 instead of 0.05",
}


@pytest.mark.parametrize("part", LOST)
def test_what_is_lost_is_named_alone(world, part):
    error = cause_of(broken(loses=[part]), world)
    assert [name for name, words in LOST.items() if words in error.cause] == [part]
    assert error.evidence == EVIDENCE.get(part)


def test_random_numbers_of_another_rank(world):
    error = cause_of(broken(rank_0_saves_for_all=True), world)
    assert error.cause.endswith("ends alike; rank 1 has those of rank 0: each rank's own were not saved")


class WithLoader(Program):
    """The program with a loader that draws from the random numbers of torch when a pass begins."""

    restores_last, shuffles = True, False

    def train(self, stop_after):
        state, samples = torch.get_rng_state(), list(DATA[:12])
        if self.shuffles:
            random.shuffle(samples)
        batches = list(DataLoader(samples, batch_size=4))
        if self.restores_last and self.taken:
            torch.set_rng_state(state)
        self.loader = iter([*batches, *batches, *batches][self.taken :])
        super().train(stop_after)

    def batch(self):
        return next(self.loader)


def test_random_numbers_that_are_restored_before_a_pass_begins(world):
    check_resumed_run(WithLoader.run, world, stop_after=2)
    error = cause_of(broken(WithLoader, restores_last=False), world)
    assert "they are 1 seed further: a DataLoader draws one when a pass begins" in error.cause


def test_an_order_of_the_data_that_is_neither_seeded_nor_saved(world):
    error = cause_of(broken(WithLoader, shuffles=True), world)
    assert "is given other data than in any step without a stop; started with the seed of that run" in error.cause


def test_a_program_that_begins_anew(world):
    error = cause_of(broken(resume=lambda self: None), world)
    assert "after 2 of 4 optimizer steps and run again, rank 0 takes 4 steps, 2 were left" in str(error)
    assert (
        error.cause
        == "it begins anew, with the weights of the start: it does not find the checkpoint, or does not load it"
    )
    error = cause_of(broken(loses=["steps"]), world)
    assert error.cause.startswith("it loads the weights, and takes all steps again")


def test_a_returned_state_that_no_step_uses(world):
    class Averages(Program):
        def train(self, stop_after):
            first = self.taken
            super().train(stop_after)
            self.average = torch.full((2,), float(self.taken - first))

        def returned(self):
            return super().returned() | {"average": self.average}

    error = cause_of(Averages.run, world)
    assert error.cause == "not saved, or not loaded: average; every optimizer step is that of the run without a stop"


def test_runs_that_cannot_be_compared_are_inconclusive(world):
    with pytest.raises(Inconclusive, match="it takes 4 optimizer steps, without a stop 4: it must stop"):
        check_resumed_run(Program.run, world, stop_after=4)

    class Shortened(Program):
        def train(self, stop_after):
            self.optimizer.param_groups[0]["lr"] /= stop_after or STEPS
            super().train(stop_after)

    with pytest.raises(Inconclusive, match=r"step 1 on rank 0: the settings of the optimizer\. .* a stop changes its"):
        check_resumed_run(Shortened.run, world)


def test_the_dict_of_run_is_validated(world):
    with pytest.raises(TypeError, match="run must return a dict of what must be equal, it returned a NoneType"):
        check_resumed_run(lambda folder, stop_after: None, world)
    with pytest.raises(ValueError, match="a stop after 1 step or more, got 0"):
        check_resumed_run(Program.run, world, stop_after=0)


def test_learning_rates_that_do_not_change_are_not_seen(world):
    found = []
    with listening(lambda check, conditions: found.append((check, conditions))):
        check_resumed_run(Program.run, world, stop_after=1)
    words = "a change of the learning rate"
    assert found == [("check_resumed_run", {f"{words} before the save": False, f"{words} after the save": True})]
