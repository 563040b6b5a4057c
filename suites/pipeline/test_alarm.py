"""Steps that begin without a header: a deviation of one rank reaches all ranks before anything changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pdlcheck.primitives.pipeline import Cell, Schedule
from pdlcheck.primitives.pipeline.step_veto import bearer
from pdlcheck.worlds import get_world

from .models import MSE, SGD, errors, rank_of, samples, tanh_net

pytestmark = pytest.mark.verifies("Pipeline")

KINDS = [("gpipe", 2), ("1f1b", 2), ("1f1b", 3), ("interleaved", 2)]
kinds = pytest.mark.parametrize(("schedule", "n"), KINDS, ids=[f"{kind}-{n}" for kind, n in KINDS])


def moving_net():
    """Return a model with random numbers and running statistics in each of up to four stages."""
    parts = ([nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.3)] for _ in range(4))
    return nn.Sequential(*(layer for part in parts for layer in part))


def state(module):
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [*grads, *(buffer.clone() for buffer in module.buffers()), torch.get_rng_state()]


def targets_as_double(rank, last, pipeline, x, y):
    """Return targets that only the last rank finds wrong."""
    return x, y.double() if rank == last else y


def fewer_samples(rank, last, pipeline, x, y):
    return x[:9], y[:9]


def first_rank_does_not_learn(rank, last, pipeline, x, y):
    pipeline.module.train(rank != 0)
    return x, y


def last_rank_does_not_learn(rank, last, pipeline, x, y):
    pipeline.module.train(rank != last)
    return x, y


@pytest.mark.slow
@kinds
@pytest.mark.parametrize(
    "change", [targets_as_double, fewer_samples, first_rank_does_not_learn, last_rank_does_not_learn]
)
def test_a_step_that_one_rank_takes_otherwise_is_as_in_a_pipeline_made_anew(subject, world, schedule, n, change):
    def program(anew):
        torch.manual_seed(0)
        model = moving_net()
        rank, last = rank_of()
        make = lambda: subject(model, lambda out, y: MSE(out, y.float()), schedule=schedule, n_microbatches=4)  # noqa: E731
        pipeline = make()
        seen = []
        for number in range(7):
            if anew:
                pipeline = make()
            x, y = samples(12, seed=number)
            pipeline.module.train()
            if number in (2, 3, 5):
                x, y = change(rank, last, pipeline, x, y)
            result = pipeline.step(x if rank == 0 else None, y if rank == last else None)
            seen += [*state(pipeline.module), *([] if result.loss is None else [result.loss, result.outputs])]
        return seen

    for kept, made in zip(world.run(program, False, world_size=n), world.run(program, True, world_size=n), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, made, strict=True))


def no_inputs(rank, pipeline, x, y):
    return None, y


def fewer_targets(rank, pipeline, x, y):
    return x, y[:5]


def other_layer(rank, pipeline, x, y):
    name = next(iter(pipeline.module._modules))
    pipeline.module._modules[name] = nn.Identity()
    return x, y


@pytest.mark.beyond_contract("error messages")
@kinds
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "where", "message"),
    [
        (no_inputs, 0, "Pipeline needs inputs on the rank that reads them, got None"),
        (fewer_targets, -1, "Pipeline needs a target for every input, got batches of 5 and 8 samples"),
        (other_layer, 0, "was replaced after the pipeline was made"),
        (other_layer, -1, "was replaced after the pipeline was made"),
    ],
    ids=["inputs", "targets", "first", "last"],
)
def test_what_one_rank_refuses_in_a_later_step_leaves_no_trace(
    subject, world, schedule, n, step, spoil, where, message
):
    def program(rank):
        torch.manual_seed(0)
        pipeline = subject(moving_net(), MSE, schedule=schedule, n_microbatches=4)
        x, y = samples(8)
        for _ in range(step):
            pipeline.step(x, y)
        before, layers = state(pipeline.module), dict(pipeline.module._modules)
        pipeline.module.zero_grad()
        with pytest.raises(ValueError, match=message) as caught:
            pipeline.step(*(spoil(rank, pipeline, x, y) if rank == where % n else (x, y)))
        assert all(p.grad is None for p in pipeline.module.parameters())
        pipeline.module._modules.update(layers)
        after = state(pipeline.module)
        count = len([*pipeline.module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(before[count:], after[count:], strict=True))
        for _ in range(2):
            pipeline.module.zero_grad()
            pipeline.step(x, y)
        assert all(p.grad is not None for p in pipeline.module.parameters())
        raise caught.value

    found = errors(world, program, n)
    assert len(set(found)) == 1
    assert message in found[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_steps_that_are_alike_send_a_byte_more_and_nothing_else(subject, schedule):
    def steps(count):
        pipeline = subject(tanh_net(), MSE, schedule=schedule, n_microbatches=4)
        for _ in range(count):
            pipeline.step(*samples(8))

    def totals(count):
        sim = get_world("sim")
        sim.run(steps, count, world_size=2)
        flows = [flow for (_, _, op), flow in sim.traffic.flows.items()]
        return [sum(column) for column in zip(*flows, strict=True)]

    two, three = totals(2), totals(3)
    forth_and_back = 2 * 4
    assert three[0] - two[0] == forth_and_back
    assert three[1] - two[1] == forth_and_back * 2 * 3 * 4 + 2


def test_a_grid_in_which_no_message_passes_every_rank_first_begins_each_step_with_a_header(subject, world):
    forward = [Cell(0, "F", 0), Cell(0, "F", 1), None, None, None], [None, Cell(1, "F", 0), Cell(1, "F", 1)]
    back = [Cell(0, "B", 1), Cell(0, "B", 0)], [Cell(1, "B", 0), Cell(1, "B", 1), None, None]
    grid = Schedule("crossed", tuple((*f, *b) for f, b in zip(forward, back, strict=True)))

    def program():
        torch.manual_seed(0)
        pipeline = subject(tanh_net(), MSE, schedule=grid)
        for _ in range(3):
            pipeline.module.zero_grad()
            pipeline.step(*samples(4))
        return [p.grad for p in pipeline.module.parameters()]

    torch.manual_seed(0)
    model, (x, y) = tanh_net(), samples(4)
    MSE(model(x), y).backward()
    found = [grad for rank in world.run(program, world_size=2) for grad in rank]
    assert all(torch.allclose(p.grad, grad) for p, grad in zip(model.parameters(), found, strict=True))
    assert bearer(grid) is None


def test_pipedream_takes_steps_that_are_alike(subject, world):
    def program(anew):
        torch.manual_seed(0)
        model = tanh_net()
        make = lambda: subject(model, MSE, schedule="pipedream", n_microbatches=4, optimizer=SGD)  # noqa: E731
        pipeline = make()
        for number in range(4):
            if anew:
                pipeline = make()
            pipeline.step(*samples(8 if number < 2 else 6, seed=number))
        return [p.detach().clone() for p in pipeline.module.parameters()]

    for kept, made in zip(world.run(program, False, world_size=3), world.run(program, True, world_size=3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, made, strict=True))
