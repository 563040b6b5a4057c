"""check_local_sgd rejects trainers that average at a wrong time or wrongly, names the cause, and accepts the twin."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import Deadlock, Inconclusive

from .local_sgd_by_hand import Trainer, check_trainer, mean_of

ADAM = partial(torch.optim.Adam, lr=0.05)


class AverageMomentum(Trainer):
    """A trainer that averages the state of Adam too."""

    def meet(self):
        super().meet()
        for tensor in self.states("exp_avg", "exp_avg_sq"):
            mean_of(tensor)


class Outer(Trainer):
    """DiLoCo by hand."""

    sign = 1
    nesterov = True
    keeps_reference = False

    @torch.no_grad()
    def average(self):
        super().average()
        parameters = list(self.model.parameters())
        for place, (parameter, reference) in enumerate(zip(parameters, self.reference, strict=True)):
            gradient = self.sign * (reference - parameter)
            self.velocity[place] = 0.9 * self.velocity[place] + gradient
            way = gradient + 0.9 * self.velocity[place] if self.nesterov else self.velocity[place]
            parameter.copy_(reference - 0.7 * way)
            if not self.keeps_reference:
                reference.copy_(parameter)


# wrong ones


class NeverAverages(Trainer):
    def is_due(self):
        return False


class AveragesEveryStep(Trainer):
    every = 1


class AveragesAStepTooEarly(Trainer):
    def is_due(self):
        return (self.taken + 1) % self.every == 0


class AveragesBeforeTheStep(Trainer):
    def step(self):
        self.taken += 1
        if self.is_due():
            self.meet()
        self.optimizer.step()


class AddsModels(Trainer):
    def average(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.detach())


class DividesByTheStepsOfARound(Trainer):
    def average(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.detach())
            parameter.detach().div_(self.every)


class CopiesRank0(Trainer):
    def average(self):
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), 0)


class DropsMomentum(Trainer):
    def meet(self):
        super().meet()
        self.optimizer.state.clear()


class LeavesBuffers(Trainer):
    def share_buffers(self):
        pass


class LeavesBuffersAndAddsModels(LeavesBuffers, AddsModels):
    pass


class LeavesBuffersAndIsTooEarly(LeavesBuffers, AveragesAStepTooEarly):
    pass


class SkipsTheLastParameter(Trainer):
    def average(self):
        for parameter in list(self.model.parameters())[:-1]:
            mean_of(parameter.detach())


class CountsParameters(Trainer):
    """A trainer whose count of steps goes on at each parameter."""

    every, count = 3, 0

    def is_due(self):
        return True

    def average(self):
        for parameter in self.model.parameters():
            self.count += 1
            if self.count % self.every == 0:
                mean_of(parameter.detach())


class KeepsMomentum(AverageMomentum):
    meet = Trainer.meet


class TakesMomentumOfRank0(AverageMomentum):
    def meet(self):
        Trainer.meet(self)
        for tensor in self.states("exp_avg", "exp_avg_sq"):
            dist.broadcast(tensor, 0)


class AveragesTheFirstMomentOnly(AverageMomentum):
    def meet(self):
        Trainer.meet(self)
        for tensor in self.states("exp_avg"):
            mean_of(tensor)


class WrongSign(Outer):
    sign = -1


class KeepsTheReference(Outer):
    keeps_reference = True


class NoNesterov(Outer):
    nesterov = False


class PostLocal(Trainer):
    synchronous_steps = 2


class OneSynchronousStepTooMany(Trainer):
    synchronous_steps = 3


class ForgetsTheNode(Trainer):
    def sync(self):
        pass


class DiffersByRank(Trainer):
    """A trainer whose models differ between ranks by no more than rounding."""

    def average(self):
        super().average()
        for parameter in self.model.parameters():
            parameter.detach().mul_(1 + dist.get_rank() * 1e-15)


class CountsForItself(Trainer):
    """A trainer that skips a step on one rank, as for a loss that is NaN, and does not count the step."""

    def step(self):
        if dist.get_rank() == 1 and self.taken == 1 and not hasattr(self, "skipped"):
            self.skipped = True
            return
        super().step()


ADAM_AVERAGE = {"optimizer": ADAM, "momentum": "average"}
OUTER = {"outer": (0.7, 0.9, True)}
NODES = {"nodes": [[0, 2], [1]]}
RIGHT = [
    (Trainer, {}),
    (AverageMomentum, ADAM_AVERAGE),
    (Outer, OUTER),
    (PostLocal, {"synchronous_steps": 2}),
    (Trainer, NODES),
    (LeavesBuffers, {"buffers": "keep"}),
    (DropsMomentum, {"momentum": "reset"}),
    (KeepsMomentum, {"optimizer": ADAM}),
]
WRONG = [
    (NeverAverages, {}, "after step 2 rank 0 holds .*models are never averaged"),
    (AveragesEveryStep, {}, "after step 1 rank 0 holds .*models are averaged after every step"),
    (AveragesAStepTooEarly, {}, "after step 1 rank 0 holds .*models are averaged one step too early"),
    (AveragesBeforeTheStep, {}, "after step 2 rank 0 holds .*averaged before the step, not after it"),
    (AddsModels, {}, "the sum is not divided by the number of ranks"),
    (DividesByTheStepsOfARound, {}, r"all weights are 1\.5 times the mean: 3 models were added and divided by 2\n"),
    (CopiesRank0, {}, "every rank takes the model of rank 0: it is copied, not averaged"),
    (DropsMomentum, {}, "holds nothing as momentum_buffer .*dropped in each round, which momentum='reset' accepts"),
    (LeavesBuffers, {}, "rank 1 .* of buffer '1.running_mean'.*its own buffers: .*, which buffers='keep' accepts\n"),
    (LeavesBuffersAndAddsModels, {}, "by the number of ranks; and each rank keeps its own buffers: they drift apart"),
    (LeavesBuffersAndAddsModels, {"buffers": "keep"}, "by the number of ranks\n"),
    (
        LeavesBuffersAndIsTooEarly,
        {},
        "one step too early, .*=1 accepts; and each rank keeps its own buffers: they drift",
    ),
    (
        SkipsTheLastParameter,
        {},
        "'3.bias' never; by the rule all are averaged after steps 2, 4 and 6: .* leaves out parameter '3",
    ),
    (
        CountsParameters,
        {},
        "parameters are averaged after different steps: .*: a count of steps goes on at each parameter",
    ),
    (KeepsMomentum, ADAM_AVERAGE, "exp_avg of .*each rank keeps its own momentum, which momentum='keep' accepts\n"),
    (TakesMomentumOfRank0, ADAM_AVERAGE, "every rank takes the momentum of rank 0"),
    (AveragesTheFirstMomentOnly, ADAM_AVERAGE, "exp_avg_sq of .*only some of the optimizer's state is averaged"),
    (Trainer, OUTER, "after step 2 .*there is no outer step: the mean is taken as it is"),
    (WrongSign, OUTER, "the outer gradient has the wrong sign: it is reference - mean"),
    (KeepsTheReference, OUTER, "after step 4 .*the reference stays what it was"),
    (NoNesterov, OUTER, "the outer momentum is .or is not. Nesterov's"),
    (Trainer, {"synchronous_steps": 2}, "after step 1 .*the first steps are not synchronous"),
    (OneSynchronousStepTooMany, {"synchronous_steps": 2}, "there is one synchronous step too many"),
    (ForgetsTheNode, NODES, "after step 1 .*gradients are not synchronised within a node"),
    (DiffersByRank, {}, "replicas differ after step 2: rank [12] holds .* rank 0 holds"),
]


def case_id(case):
    return "-".join([case[0].__name__, *case[1]])


@pytest.mark.parametrize("case", RIGHT, ids=case_id)
def test_check_local_sgd_accepts(world, case):
    right, rule = case
    check_trainer(right, world, sync_every=2, **rule)


@pytest.mark.parametrize("case", WRONG, ids=case_id)
def test_check_local_sgd_rejects(world, case):
    wrong, rule, message = case
    with pytest.raises(AssertionError, match=rf"(?s)^{wrong.__name__}: .*{message}"):
        check_trainer(wrong, world, sync_every=2, **rule)


def test_ranks_that_count_for_themselves_are_reported_and_not_waited_for(world):
    """Rank 1 has one round less at the end, and rank 0 waits in that round."""
    with pytest.raises(Deadlock, match="no rank can go on"):
        check_trainer(CountsForItself, world, sync_every=2)


def test_replicas_that_never_meet_are_inconclusive(world):
    with pytest.raises(Inconclusive, match=r"Trainer: in .* steps the replicas never meet"):
        check_trainer(Trainer, world, sync_every=9)


def test_one_rank_is_nothing_to_compare(world):
    with pytest.raises(ValueError, match="needs world_size 2 or more, got 1"):
        check_trainer(Trainer, world, sync_every=2, world_size=1)


def test_replicas_meet_after_a_step_or_more(world):
    for name in ("sync_every", "gradients_every"):
        with pytest.raises(ValueError, match=f"needs a {name} of 1 or more, or None, got 0"):
            check_trainer(Trainer, world, **{"sync_every": 2, name: 0})


class Gradients:
    """A trainer that synchronises gradients at every second step."""

    def __init__(self, optimizer, model):
        self.optimizer, self.model, self.taken = optimizer, model, 0

    def step(self):
        self.taken += 1
        if self.taken % 2 == 0:
            for parameter in self.model.parameters():
                self.sync(parameter.grad)
        self.optimizer.step()

    def sync(self, grad):
        mean_of(grad)


class AddsGradients(Gradients):
    def sync(self, grad):
        dist.all_reduce(grad)


def test_check_local_sgd_looks_at_synchronised_gradients(world):
    rule = {"sync_every": None, "gradients_every": 2, "buffers": "keep"}
    check_trainer(Gradients, world, **rule)
    with pytest.raises(AssertionError, match=r"AddsGradients: after step 2 [\s\S]*gradients are added, not averaged"):
        check_trainer(AddsGradients, world, **rule)


class Uneven(Trainer):
    """A correct trainer for different numbers of steps: a rank that has finished keeps meeting the others."""

    def meet(self, is_active=True):
        working = torch.tensor([float(is_active)])
        dist.all_reduce(working)
        super().meet()
        return bool(working)

    def finish(self):
        while self.meet(is_active=False):
            pass


class LeavesEarly(Uneven):
    """A trainer that meets the others once after its last step, and leaves."""

    def finish(self):
        self.meet(is_active=False)


def test_check_local_sgd_finds_a_rank_that_does_not_wait_for_the_others(world):
    check_trainer(Uneven, world, sync_every=2, steps=[5, 1, 3])
    with pytest.raises(Deadlock):
        check_trainer(LeavesEarly, world, sync_every=2, steps=[7, 1, 1])
