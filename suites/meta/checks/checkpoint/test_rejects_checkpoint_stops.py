"""check_resume stops a training in further places if the user names none, and only where a training may stop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from pdlcheck.checks import check_resume
from pdlcheck.checks.checkpoint.events import Course, further_stops
from pdlcheck.seen_conditions import listening

from .loader_trainers import DATA, SkipsInEpoch0, Trainer, rank


class LosesMomentumOfTheFirstStep(Trainer):
    """A trainer whose first epoch is longer than the check, so that the first step is the only further stop."""

    batch_size = 2

    def restore(self, state):
        super().restore(state)
        if (self.epoch, self.place) == (0, 1):
            self.optimizer.state.clear()


class SavesWithinAnEpochOnly(SkipsInEpoch0):
    def save(self, path):
        if self.epoch:
            raise RuntimeError("no checkpoint in the second epoch")
        super().save(path)


class EveryThirdStep:
    """A trainer that may save after every third step; for which reason depends on ``kind``.

    ``epoch``: it cannot resume within a pass, which has 3 batches. ``update``: it sums the gradients of 3 steps.
    ``ranks``: it averages the weights of the ranks in every third step, and rank 0 saves for all.
    """

    def __init__(self, kind):
        torch.manual_seed(0)
        self.kind, self.model, self.place = kind, nn.Linear(3, 1), 0
        batches = 3 if kind == "epoch" else 4
        self.loader = DataLoader(DATA[rank() :: 2][: 4 * batches], batch_size=4, generator=torch.Generator())
        self.batches = None

    def step(self, i):
        if self.batches is None:
            self.batches = iter(self.loader)
            for _ in range(0 if self.kind == "epoch" else self.place):
                next(self.batches)
        self.model(next(self.batches)).square().mean().backward()
        self.place += 1
        if self.place == len(self.loader):
            self.place, self.batches = 0, None
        if self.kind != "update" or i % 3 == 2:
            for parameter in self.model.parameters():
                if self.kind != "ranks":
                    dist.all_reduce(parameter.grad)
                parameter.data -= 0.1 * parameter.grad
                if self.kind == "ranks" and i % 3 == 2:
                    dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
            self.model.zero_grad()

    def save(self, path):
        if rank() == 0:
            torch.save([self.model.state_dict(), self.place], path)
        dist.barrier()

    def load(self, path):
        state, self.place = torch.load(path)
        self.model.load_state_dict(state)

    @classmethod
    def starts(cls, kind):
        def start():
            one = cls(kind)
            return one.model, one.step, one.save, one.load

        return start


def test_a_fault_of_the_second_epoch_is_found_without_arguments(world):
    first = (
        r"start: resumed after step 5, rank 0 after step 6 .*\n.*cause  step 6 got the batch of step 2: in step 6 the "
    )
    with pytest.raises(AssertionError, match=rf"(?s){first}sampler had epoch 0.* saved_after=5 steps=6"):
        check_resume(SkipsInEpoch0.start, world)


def test_a_fault_after_the_first_step_is_found_without_arguments(world):
    with pytest.raises(AssertionError, match=r"(?s)after step 1, .*cause  lost: optimizer; .* saved_after=1 steps=6"):
        check_resume(LosesMomentumOfTheFirstStep.start, world)


def test_a_place_that_the_user_names_is_the_only_one(world):
    check_resume(SkipsInEpoch0.start, world, saved_after=3)


def test_what_further_stops_have_met_is_reported(world):
    found = {}
    with listening(lambda check, conditions: found.update(conditions)):
        check_resume(Trainer.start, world)
        alone = dict(found)
        check_resume(Trainer.start, world, saved_after=3)
    assert (alone["an epoch end before the save"], found["an epoch end before the save"]) == (True, False)


@pytest.mark.parametrize("kind", ["epoch", "update", "ranks"])
def test_a_training_that_may_not_stop_elsewhere_passes(world, kind):
    check_resume(EveryThirdStep.starts(kind), world)
    with pytest.raises(AssertionError, match="resumed after step 4, "):
        check_resume(EveryThirdStep.starts(kind), world, saved_after=4)


def test_a_program_may_refuse_to_save_elsewhere(world):
    check_resume(SavesWithinAnEpochOnly.start, world)


def course(passes, weights="0123456", loaders=1):
    return Course(passes, None, loaders, [{"weight": weight} for weight in weights])


@pytest.mark.parametrize(
    ("courses", "stop", "stops"),
    [
        ([course([1, 0, 0, 0, 1, 0])] * 2, 3, [5, 4, 1]),
        ([course([1, 0, 0, 0, 0, 1])] * 2, 3, [5, 1]),  # no step in the second epoch comes after a stop
        ([course([1, 0, 0, 0, 0, 0])] * 2, 3, [1]),
        ([course([1, 0, 0, 1, 0, 0])] * 2, 3, []),  # 3 is the end of an epoch, and there is no other
        ([course([1, 1, 1, 1, 1, 1])] * 2, 3, [2, 1]),
        ([course([1, 0, 0, 0, 1, 0], "0011223")] * 2, 3, [4]),  # steps 1 and 5 do not update the weights
        ([course([1, 0, 0, 0, 1, 0], "0123334")] * 2, 3, [1]),
        ([course([1, 0, 0, 0, 1, 0], "0abcdef"), course([1, 0, 0, 0, 1, 0], "0ABcDeF")], 3, [5]),
        ([course([1, 0, 0, 0, 1, 0], "0abcdef"), course([1, 0, 0, 0, 1, 0], "0ABCDEF")], 3, [5, 4, 1]),
        ([course([0] * 6, loaders=0)] * 2, 3, []),
        ([course([1, 0, 0, 0, 1, 0], "")] * 2, 3, []),  # a large model
    ],
)
def test_further_stops_are_of_the_kind_of_the_first(courses, stop, stops):
    assert further_stops(courses, stop) == stops
