"""Watched data parallel trainings: each fault with its message, and right ones without an alarm."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pdlcheck
from pdlcheck.errors import RanksDiffer, RanksDifferWarning
from pdlcheck.worlds import get_world

from .trainings import adam, ddp, linears, net, on_rank, plain_sgd, sgd

SIM = get_world("sim")
EARLIER = "the gradients of this step agree, so the fault is in an earlier one, after step 2"


def rank_is(rank):
    return dist.get_rank() == rank


def alone(model):
    return model


def own_start(model):
    torch.manual_seed(dist.get_rank())
    model[0].reset_parameters()


def own_initial_buffer(model):
    model[1].num_batches_tracked += rank_is(1)


def scaled_gradients(model, optimizer):
    for parameter in model.parameters():
        parameter.grad *= 1 + dist.get_rank()


def scaled_gradient(model, optimizer):
    model.module[0].weight.grad *= 1 + dist.get_rank()


def no_gradient(model, optimizer):
    if rank_is(2):
        model.module[4].bias.grad = None


def other_lr(model, optimizer):
    if rank_is(1):
        optimizer.param_groups[0]["lr"] = 0.01


def flipped_bit(model, optimizer):
    if rank_is(1):
        model.module[4].weight.detach().view(torch.int32)[1, 2] ^= 1 << 12


def clipped_weights(model, optimizer):
    if rank_is(1):
        for parameter in model.parameters():
            parameter.detach().clamp_(-0.1, 0.1)


def lost_state(model, optimizer):
    if rank_is(1):
        optimizer.state[model.module[0].bias]["exp_avg"].zero_()


def counted_on_one_rank(model, optimizer):
    if rank_is(1):
        model.module[1].num_batches_tracked += 1


def other_shape(model):
    if rank_is(1):
        model.register_buffer("extra", torch.zeros(3))


FAULTS = {
    "start": (
        {"before": own_start, "wrap": alone},
        "before the first step: ranks 1, 2 have another parameter '0.weight' than rank 0",
        "the first weights were not broadcast",
    ),
    "start of a buffer": (
        {"before": own_initial_buffer, "wrap": alone},
        "before the first step: rank 1 has another buffer '1.num_batches_tracked' than ranks 0, 2",
        "the buffers were not broadcast, or each rank updated them",
    ),
    "start of the settings": (
        {"start": other_lr},
        "before the first step: rank 1 has 0.01 as 'lr' of group 0, rank 0 has 0.1",
        "the ranks made their optimizers with different settings",
    ),
    "tensor of one rank": (
        {"before": other_shape, "wrap": alone},
        r"before the first step: rank 1 has \(3,\) float32 as buffer 'extra', rank 0 has nothing",
        "the ranks built different models, or hold shards",
    ),
    "gradients that are not averaged": (
        {"wrap": alone, "steps": 2, "every": 1},
        "after step 1: ranks 1, 2 have another gradient of '0.weight' than rank 0",
        "the gradients were not averaged over these ranks in this step",
    ),
    "gradient that one rank scales": (
        {"fault": scaled_gradient, "at": 4},
        "after step 4: ranks 1, 2 have another gradient of 'module.0.weight' than rank 0",
        "the gradients were not averaged over these ranks in this step, or a rank changed them after that",
    ),
    "gradient that one rank lacks": (
        {"fault": no_gradient, "at": 4},
        r"after step 4: rank 2 has None as gradient of 'module.4.bias', rank 0 has \(3,\) float32",
        "on rank 2 the backward pass did not reach this parameter",
    ),
    "gradients of an earlier step": (
        {"fault": scaled_gradients},
        "after step 4: ranks 1, 2 have another parameter 'module.0.weight' than rank 0",
        f"{EARLIER}: its gradients were not averaged, or changed after that on some ranks",
    ),
    "gradients of an earlier step, without momentum": (
        {"fault": scaled_gradients, "optimizer": plain_sgd},
        "after step 4: ranks 1, 2 have another parameter 'module.0.weight' than rank 0",
        f"{EARLIER}: its gradients were not averaged, or some ranks did not take it, or code outside",
    ),
    "gradient that one rank lacked": (
        {"fault": no_gradient},
        "after step 4: rank 2 has another parameter 'module.4.bias' than ranks 0, 1",
        f"{EARLIER}: some ranks did not take it, or had no gradient of this parameter in it",
    ),
    "learning rate": (
        {"fault": other_lr},
        "after step 4: rank 1 has 0.01 as 'lr' of group 0, rank 0 has 0.1",
        "a scheduler, or other code that sets it, ran on some ranks only",
    ),
    "bit": (
        {"fault": flipped_bit, "at": 4},
        "after step 4: rank 1 has another parameter 'module.4.weight' than ranks 0, 2",
        r"the gradients of this step and all other parameters agree: a memory error \(silent data corruption\)",
    ),
    "weights": (
        {"fault": clipped_weights, "at": 4},
        "after step 4: rank 1 has another parameter 'module.0.weight' than ranks 0, 2",
        "code outside the optimizer, such as a load or a clip, changed the parameters on some ranks only",
    ),
    "state": (
        {"fault": lost_state, "at": 4},
        "after step 4: rank 1 has another parameter 'module.0.bias' than ranks 0, 2",
        EARLIER,
    ),
    "buffers": (
        {"fault": counted_on_one_rank, "at": 4},
        "after step 4: rank 1 has another buffer 'module.1.num_batches_tracked' than ranks 0, 2",
        "each rank updates the buffer from its own samples, or some ranks changed it",
    ),
    "statistics of batch norm": (
        {"buffers": True},
        "before the first step: ranks 1, 2 have another buffer 'module.1.running_mean' than rank 0",
        "the buffers were not broadcast, or each rank updated them from its own samples",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_by_every_rank(name):
    options, headline, cause = FAULTS[name]
    with pytest.raises(RanksDiffer, match=rf"pdlcheck\.watch, {headline}(.|\n)*likely cause  .*{cause}") as raised:
        SIM.run(on_rank, world_size=3, **options)
    assert "ranks 0-2 of 3 raised this" in "\n".join([str(raised.value), *raised.value.__notes__])


def test_a_report_has_fields_and_the_last_step_that_was_right():
    error = SIM.run(on_rank, scaled_gradient, at=4, world_size=3, on_violation=lambda error: None)[2]
    assert (error.step, error.kind, error.rank) == (4, "gradients", 1)
    assert error.tensor == "gradient of 'module.0.weight'"
    assert error.cause.startswith("the gradients were not averaged")
    assert "last agreed   after step 2\n" in str(error)
    assert "differ        parameters (1), gradients (1), optimizer state (2)\n" in str(error)


RIGHT = {
    "adam": {},
    "momentum": {"optimizer": sgd, "every": 1},
    "no batch norm": {"make": linears, "buffers": True},
    "a scheduler": {"after": lambda optimizer: optimizer.param_groups[0].update(lr=0.5)},
    "a buffer that DDP mends in the next forward pass": {"fault": counted_on_one_rank},
    "buffers of each rank": {"fault": counted_on_one_rank, "at": 4, "buffers": False},
    "an ignored tensor": {"fault": flipped_bit, "at": 4, "ignore": ["*.4.weight"]},
    "a local gradient by intention": {"fault": scaled_gradients, "at": 4, "gradients": False, "ignore": ["module.*"]},
    "no state": {"fault": lost_state, "at": 4, "optimizer_state": False, "ignore": ["module.0.bias"]},
    "no comparison": {"fault": scaled_gradients, "every": None},
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_training_gives_no_alarm(name):
    assert SIM.run(on_rank, world_size=3, **RIGHT[name]) == [None, None, None]


def test_on_processes(world):
    assert world.run(on_rank, world_size=2) == [None, None]
    with pytest.raises(RanksDiffer, match=r"after step 4: rank 1 has another gradient of 'module.0.weight'"):
        world.run(on_rank, scaled_gradient, at=4, world_size=2)


def low_precision():
    """Train under autocast with a scaler that all ranks agree on."""
    torch.manual_seed(0)
    model = ddp(net())
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with pdlcheck.watch(model, optimizer, every=1, scaler=scaler) as watcher:
        torch.manual_seed(dist.get_rank())
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(5, 4)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(None if step else 256.0 * (1 + low_precision.fault * rank_is(1)))
    return watcher.steps


def test_mixed_precision_and_a_scale_that_differs():
    low_precision.fault = 0
    assert SIM.run(low_precision, world_size=2) == [3, 3]
    low_precision.fault = 1
    cause = "a rank updated the scale from its own gradients"
    match = rf"after step 2: rank 1 has 512.0 as 'scale' of the scaler, rank 0 has 256.0(.|\n)*{cause}"
    with pytest.raises(RanksDiffer, match=match):
        SIM.run(low_precision, world_size=2)


def with_closure(fault):
    torch.manual_seed(0)
    model = ddp(linears())
    optimizer = sgd(model)
    pdlcheck.watch(model, optimizer, every=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        if fault:
            scaled_gradient(model, optimizer)
        return loss

    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.step(closure)


def test_gradients_of_a_closure_are_compared_after_the_step():
    SIM.run(with_closure, False, world_size=2)
    with pytest.raises(RanksDiffer, match=r"after step 1: rank 1 has another gradient of 'module.0.weight'"):
        SIM.run(with_closure, True, world_size=2)


class Consuming(torch.optim.Optimizer):
    """An optimizer that leaves no gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None


def test_gradients_are_those_that_the_optimizer_is_given():
    run = functools.partial(SIM.run, on_rank, world_size=2, optimizer=lambda model: Consuming(model.parameters(), {}))
    run()
    with pytest.raises(RanksDiffer, match=r"after step 4: rank 1 has another gradient of 'module.0.weight'"):
        run(scaled_gradient, at=4)


class Child(torch.optim.SGD):
    """An optimizer whose step calls that of its parent, which runs the hooks of both; it fails once."""

    failed = False

    def step(self, closure=None):
        super().step(closure)
        if not self.failed:
            self.failed = True
            raise OverflowError


def test_a_step_within_a_step_counts_once_and_a_failed_one_does_not():
    def run():
        model = nn.Linear(2, 1)
        plain_sgd(model)
        optimizer = Child(model.parameters(), lr=0.1)
        with pdlcheck.watch(model, optimizer, every=1, ignore=["*"]) as watcher:
            with pytest.raises(OverflowError):
                optimizer.step()
            failed = watcher.steps
            optimizer.step()
            optimizer.step()
        return failed, watcher.steps

    assert SIM.run(run, world_size=2) == [(0, 2)] * 2


# data and random streams


def test_ranks_that_see_the_same_samples_are_reported():
    assert SIM.run(on_rank, ids=lambda step: [10 * step + dist.get_rank()], world_size=3) == [None] * 3
    assert SIM.run(on_rank, ids=lambda step: ["a", f"rank {dist.get_rank()}"], world_size=3) == [None] * 3
    same = "before the first step: ranks 0, 1, 2 saw the same samples in the same order(.|\n)*no sampler divides"
    with pytest.raises(RanksDiffer, match=same):
        SIM.run(on_rank, ids=lambda step: torch.tensor([step]), world_size=3)
    late = "after step 4: ranks 0, 2 saw the same samples in the same order(.|\n)*no sampler divides"
    with pytest.raises(RanksDiffer, match=late):
        SIM.run(on_rank, ids=lambda step: [0 if step > 2 else dist.get_rank(), rank_is(1)], world_size=3)


def test_ids_may_be_numbers_texts_arrays_and_tensors():
    def run(other):
        ids = [[0], [0, 0], range(3), ["a", 2], np.arange(3), torch.tensor([2**62]), torch.zeros(0, dtype=torch.int64)]
        model = nn.Linear(2, 1)
        watcher = pdlcheck.watch(model, plain_sgd(model), every=None, ignore=["*"], same_samples=[[0, 1]])
        for place, one in enumerate(ids):
            watcher.saw(ids[0] if place == other and rank_is(1) else one)
        watcher.compare()

    SIM.run(run, None, world_size=2)
    for other in range(1, 7):
        with pytest.raises(RanksDiffer, match="rank 1 saw other samples than rank 0"):
            SIM.run(run, other, world_size=2)


def test_ranks_that_work_on_the_same_samples_must_see_them():
    sets = [[0, 1]]
    assert SIM.run(on_rank, ids=lambda _: [rank_is(2)], same_samples=sets, world_size=3) == [None] * 3
    with pytest.raises(RanksDiffer, match=r"rank 1 saw other samples than rank 0(.|\n)*same_samples="):
        SIM.run(on_rank, ids=lambda _: [dist.get_rank()], same_samples=sets, world_size=3)


def seeds(python=0, numpy=0, torch_seed=0):
    def start(model, optimizer):
        rank = dist.get_rank()
        random.seed(python * rank)
        np.random.seed(numpy * rank)
        torch.manual_seed(torch_seed * rank)

    return start


def step_without_draws(start, **options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = plain_sgd(model)
    pdlcheck.watch(model, optimizer, **options)
    start(model, optimizer)
    optimizer.step()


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_random_streams_that_must_be_equal_or_different(name):
    argument = {"torch": "torch_seed"}.get(name, name)
    run = functools.partial(SIM.run, step_without_draws, world_size=2)
    run(seeds(), streams={name: "equal"})
    run(seeds(**{argument: 1}), streams={name: "different"})
    with pytest.raises(RanksDiffer, match=f"as stream '{name}'(.|\n)*the ranks seeded it differently"):
        run(seeds(**{argument: 1}), streams={name: "equal"})
    with pytest.raises(RanksDiffer, match=rf"ranks 0, 1 draw the same random numbers \({name}\)(.|\n)*add the rank"):
        run(seeds(), streams={name: "different"})


# what a violation does


def test_a_warning_and_a_function_get_the_first_violation_only():
    def warned():
        with pytest.warns(RanksDifferWarning, match="after step 4: ranks 1, 2 have another gradient") as caught:
            violation = on_rank(scaled_gradient, at=4, steps=9, on_violation="warn")
        return len(caught), violation.step

    assert SIM.run(warned, world_size=3) == [(1, 4)] * 3

    def called():
        errors = []
        on_rank(scaled_gradient, at=4, steps=9, on_violation=errors.append)
        return [error.step for error in errors]

    assert SIM.run(called, world_size=3) == [[4]] * 3


def test_compare_looks_at_once():
    def step(fault):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        with pdlcheck.watch(model, plain_sgd(model), every=None) as watcher:
            watcher.compare()
            with torch.no_grad():
                model.bias += fault * rank_is(1)
            watcher.compare()

    SIM.run(step, 0, world_size=2)
    with pytest.raises(RanksDiffer, match="before the first step: rank 1 has another parameter 'bias' than rank 0"):
        SIM.run(step, 1, world_size=2)


def test_a_group_is_compared_alone():
    def pairs(fault):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        torch.manual_seed(dist.get_rank() // 2)
        model = nn.Linear(2, 1)
        optimizer = plain_sgd(model)
        with pdlcheck.watch(model, optimizer, group=groups[dist.get_rank() // 2], on_violation="warn") as watcher:
            if fault and rank_is(3):
                model.bias.detach().add_(1)
                pytest.warns(RanksDifferWarning)
            with pytest.warns(RanksDifferWarning) if fault and dist.get_rank() > 1 else torch.no_grad():
                optimizer.step()
        return watcher.violation is None

    assert SIM.run(pairs, False, world_size=4) == [True] * 4
    assert SIM.run(pairs, True, world_size=4) == [True, True, False, False]


def test_a_closed_watcher_compares_nothing():
    def closed():
        torch.manual_seed(dist.get_rank())
        model = nn.Linear(2, 1)
        optimizer = plain_sgd(model)
        watcher = pdlcheck.watch(model, optimizer)
        watcher.close()
        watcher.close()
        optimizer.step()
        with pytest.raises(ValueError, match="the watcher is closed"):
            watcher.compare()

    SIM.run(closed, world_size=2)


def test_one_rank_alone_is_not_compared():
    assert SIM.run(on_rank, scaled_gradient, world_size=1) == [None]
