"""check_local_sgd handles frozen parameters, several ways to reset momentum, and rounds that begin at other steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from pdlcheck.checks import check_local_sgd

from .local_sgd_by_hand import Trainer, check_trainer, mean_of

ADAM = partial(torch.optim.Adam, lr=0.05)
DAMPED = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)


class Sharing(Trainer):
    """A trainer that changes the optimizer's state in each round."""

    def meet(self):
        super().meet()
        for parameter in self.model.parameters():
            self.share(self.optimizer.state.get(parameter, {}))


class PostLocal(Trainer):
    synchronous_steps = 2


class AddsGradients(PostLocal):
    def sync_in(self, group):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)


class SetsTo0(Sharing):
    """A trainer that sets all of the state to 0, including Adam's count of steps."""

    def share(self, state):
        for value in state.values():
            value.zero_()


class SetsMomentsTo0(Sharing):
    def share(self, state):
        for name, value in state.items():
            if name != "step":
                value.zero_()


class Drops(Sharing):
    def share(self, state):
        state.clear()


class LeavesBuffers(Trainer):
    def share_buffers(self):
        pass


class AveragesMomentum(Sharing):
    def share(self, state):
        mean_of(state["momentum_buffer"])


class AddsMomentum(Sharing):
    def share(self, state):
        dist.all_reduce(state["momentum_buffer"])


class AddsSomeMomentum(Sharing):
    def share(self, state):
        mean_of(state["momentum_buffer"])
        if state["momentum_buffer"].shape == (1,):
            state["momentum_buffer"] *= 2


class BeginsAtOnce(Trainer):
    first = 1


class BeginsAStepLate(Trainer):
    first = 3


class EveryThird(Trainer):
    every, first = 3, 1


class BeginsThreeStepsLate(Trainer):
    first = 5


class CountsToThree(Trainer):
    every = 3


class OfTorch(Trainer):
    """Post-local SGD as in torch's documentation."""

    synchronous_steps = 2

    def __init__(self, optimizer, model):
        super().__init__(optimizer, model)
        self.averager = PeriodicModelAverager(period=2, warmup_steps=self.synchronous_steps)

    def step(self):
        if self.taken < self.synchronous_steps:
            self.sync_in(None)
        self.optimizer.step()
        self.taken += 1
        self.averager.average_parameters(self.model.parameters())


def frozen():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model[0].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("right", "rule"),
    [
        (Trainer, {}),
        (PostLocal, {"synchronous_steps": 2}),
        (Trainer, {"nodes": [[0, 2], [1]]}),
        (Drops, {"momentum": "reset", "optimizer": ADAM}),
    ],
    ids=["local", "post-local", "nodes", "reset"],
)
def test_check_local_sgd_takes_models_with_frozen_parameters(world, right, rule):
    check_trainer(right, world, sync_every=2, make=frozen, **rule)


def test_check_local_sgd_rejects_gradients_that_are_added_beside_frozen_ones(world):
    with pytest.raises(AssertionError, match=r"^AddsGradients: after step 1 rank 0 holds .* of parameter '0.bias'"):
        check_trainer(AddsGradients, world, sync_every=2, synchronous_steps=2, make=frozen)


@pytest.mark.parametrize("optimizer", [None, ADAM, DAMPED], ids=["sgd", "adam", "damped"])
def test_check_local_sgd_accepts_a_reset_that_begins_anew(world, optimizer):
    rule = {"sync_every": 2, "momentum": "reset", **({"optimizer": optimizer} if optimizer else {})}
    check_trainer(Drops, world, **rule)
    if optimizer is not DAMPED:
        check_trainer(SetsTo0, world, **rule)


@pytest.mark.parametrize(("broken", "optimizer"), [(SetsMomentsTo0, ADAM), (SetsTo0, DAMPED)], ids=["adam", "damped"])
def test_check_local_sgd_rejects_zeros_that_are_other_training(world, broken, optimizer):
    cause = "is set to 0 in each round, not dropped: Adam's count of steps goes on, SGD damps the next step\n"
    with pytest.raises(AssertionError, match=rf"^{broken.__name__}: after step 3 rank 0 holds [\s\S]*{cause}"):
        check_trainer(broken, world, sync_every=2, momentum="reset", optimizer=optimizer)


def test_check_local_sgd_rejects_zeros_where_momentum_is_kept(world):
    message = r"^SetsTo0: after step 2 rank 0 holds 0 at .* of momentum_buffer[\s\S]*which momentum='reset' accepts"
    with pytest.raises(AssertionError, match=message):
        check_trainer(SetsTo0, world, sync_every=2)


def test_check_local_sgd_looks_for_causes_where_an_optimizer_starts_with_a_state(world):
    """Adagrad starts with a state, which must not be dropped."""
    with pytest.raises(AssertionError, match=r"^BeginsAStepLate: after step 2 [\s\S]*one step too late"):
        check_trainer(BeginsAStepLate, world, sync_every=2, optimizer=partial(torch.optim.Adagrad, lr=0.1))


def test_check_local_sgd_says_that_momentum_is_added_and_nothing_of_weights_that_are_right(world):
    check_trainer(AveragesMomentum, world, sync_every=2, momentum="average")
    message = r"^AddsMomentum: after step 2 rank 0 holds .* of momentum_buffer of '0.weight', replicas "
    with pytest.raises(AssertionError, match=message) as caught:
        check_trainer(AddsMomentum, world, sync_every=2, momentum="average")
    assert "likely cause  the optimizer's state is added over ranks, not averaged\n" in str(caught.value)
    with pytest.raises(AssertionError, match=r"^AddsSomeMomentum: after step 2 .* of momentum_buffer of") as caught:
        check_trainer(AddsSomeMomentum, world, sync_every=2, momentum="average")
    assert caught.value.cause is None


def test_check_local_sgd_takes_the_step_of_the_first_round(world):
    check_trainer(OfTorch, world, sync_every=2, synchronous_steps=2, first_round=1, buffers="keep")
    check_trainer(BeginsAtOnce, world, sync_every=2, first_round=1)
    check_trainer(BeginsAStepLate, world, sync_every=2, first_round=3)
    with pytest.raises(ValueError, match="check_local_sgd needs a first_round of 1 or more, or None, got 0"):
        check_trainer(Trainer, world, sync_every=2, first_round=0)


@pytest.mark.parametrize(
    ("broken", "rule", "cause"),
    [
        (
            OfTorch,
            {"synchronous_steps": 2, "buffers": "keep"},
            "one step too early, after local steps 1, 3, ... and not 2, 4, ..., which first_round=1 accepts",
        ),
        (BeginsAtOnce, {}, "one step too early, after steps 1, 3, ... and not 2, 4, ..., which first_round=1 accepts"),
        (
            BeginsAStepLate,
            {},
            "one step too late, after steps 3, 5, ... and not 2, 4, ..., which first_round=3 accepts",
        ),
        (
            Trainer,
            {"first_round": 1},
            "one step too late, after steps 2, 4, ... and not 1, 3, ..., which first_round=2",
        ),
        (
            EveryThird,
            {"sync_every": 3},
            "averaged after steps 1, 4, ... and not 3, 6, ..., which first_round=1 accepts",
        ),
        (BeginsThreeStepsLate, {}, "averaged after steps 5, 7, ... and not 2, 4, ..., which first_round=5 accepts"),
        (CountsToThree, {}, "models are averaged after every 3 steps, not 2"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_local_sgd_names_the_steps_after_which_models_are_averaged(world, broken, rule, cause):
    with pytest.raises(AssertionError) as caught:
        check_trainer(broken, world, **{"sync_every": 2, **rule})
    assert str(caught.value).startswith(f"{broken.__name__}: after step ")
    assert cause in str(caught.value)


class Counts(nn.Module):
    """A layer with integer and boolean buffers: the calls, which are the same on all ranks, and what samples decide."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positive", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def forward(self, x):
        self.calls += 1
        self.positive += (x > 0).sum(0)
        self.seen |= (x > 1).any(0)
        return self.layer(x)


class AveragesFloats(Trainer):
    """A trainer that averages buffers, and leaves integers, which have no mean, as they are."""

    def share_buffers(self):
        for buffer in self.model.buffers():
            mean = buffer.double()
            mean_of(mean)
            self.put(buffer, mean)

    def put(self, buffer, mean):
        if buffer.is_floating_point():
            buffer.copy_(mean)


class Rounds(AveragesFloats):
    def put(self, buffer, mean):
        buffer.copy_(mean.round())


class AddsCalls(AveragesFloats):
    def put(self, buffer, mean):
        if buffer.dtype == torch.int64:
            buffer.copy_((mean * dist.get_world_size()).round())


@pytest.mark.parametrize(("right", "way"), [(AveragesFloats, "keep"), (Rounds, "round")])
def test_integers_that_differ_are_treated_as_the_caller_says(world, right, way):
    rule = {"sync_every": 2, "make": Counts, "buffers": "average"}
    check_trainer(right, world, integer_buffers=way, **rule)
    with pytest.raises(
        ValueError, match=rf"needs integer_buffers=, .*; this trainer does what integer_buffers='{way}'"
    ):
        check_trainer(right, world, **rule)
    with pytest.raises(AssertionError, match=r"of buffer '(positive|seen)'") as caught:
        check_trainer(right, world, integer_buffers="broadcast", **rule)
    assert f"which integer_buffers='{way}' accepts" in caught.value.cause


def test_integers_that_are_equal_have_a_mean(world):
    with pytest.raises(AssertionError, match=r"after step 2 rank 0 holds 6 at \(\) of buffer 'calls', replicas in one"):
        check_trainer(AddsCalls, world, sync_every=2, make=Counts, buffers="average", integer_buffers="keep")


@pytest.mark.parametrize(
    ("trainer", "way"), [(Trainer, "broadcast"), (LeavesBuffers, "keep"), (AveragesFloats, "average")]
)
def test_check_local_sgd_asks_for_the_treatment_of_buffers(world, trainer, way):
    message = (
        r"^check_local_sgd needs buffers=, because buffer '1.running_mean' of step 2 depends on what a round does to "
        rf"buffers; pass 'keep', 'broadcast' or 'average', whichever is meant; this trainer does what buffers='{way}'"
    )
    with pytest.raises(ValueError, match=message):
        check_local_sgd(trainer, world, sync_every=2)
    check_local_sgd(trainer, world, sync_every=2, buffers=way)


class Calls(nn.Module):
    """A layer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize("make", [frozen, Calls])
def test_check_local_sgd_does_not_ask_for_what_changes_nothing(world, make):
    """One model has no buffers, the other has a buffer that is equal on all ranks."""
    for right in (Trainer, LeavesBuffers):
        check_local_sgd(right, world, sync_every=2, make=make)


def test_boolean_buffers_are_compared(world):
    check_trainer(Trainer, world, sync_every=2, make=Counts)
    with pytest.raises(AssertionError, match=r"of buffer 'seen'|of buffer 'positive'"):
        check_trainer(AveragesFloats, world, sync_every=2, make=Counts)
