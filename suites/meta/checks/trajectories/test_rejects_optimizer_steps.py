"""check_same_trajectory on faults that the weights hide, and the steps of optimizers show."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pdlcheck.checks import check_same_trajectory
from pdlcheck.checks.evidence.optimizers import record_optimizers

DATA = torch.randn(32, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2)


def net():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(model, steps):
    data = DATA.to(next(model.parameters()).dtype)
    return [(batch[:, :3], batch[:, 3:]) for batch in data.split(8)[:steps]]


def plainly(model, steps, *, optimizer=ADAM):
    adam = optimizer(model.parameters())
    for inputs, targets in batches(model, steps):
        adam.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        adam.step()


def ddp(model, steps, *, factor=1.0, optimizer=ADAM, schedule=None, twice=False, frozen=(), left_out=()):
    """Train with DDP; each keyword but ``optimizer`` is a fault."""
    replica = DistributedDataParallel(model)
    adam = optimizer([one for name, one in model.named_parameters() if name not in left_out])
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, schedule) if schedule else None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for inputs, targets in batches(model, steps):
        adam.zero_grad()
        (factor * nn.functional.mse_loss(replica(inputs[rank::ranks]), targets[rank::ranks])).backward()
        for name, parameter in model.named_parameters():
            if name in frozen:
                parameter.grad = None
        for _ in range(1 + twice):
            adam.step()
        if scheduler:
            scheduler.step()


def rejected(world, train, reference=plainly, **more):
    with pytest.raises(AssertionError) as caught:
        check_same_trajectory(train, reference, net, world, **more)
    return caught.value


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2.0, "as world_size is 2: gradients are summed, not averaged, over ranks"),
        (0.5, "as world_size is 2: gradients are divided by it, or by as many micro-batches, once too often"),
        (7.0, "the gradients are 7 times as large"),
        (1.5, "all gradients that the optimizer got are those of plainly times 1.5: their norm"),
    ],
)
def test_a_factor_that_adam_hides_is_found(world, factor, cause):
    error = rejected(world, functools.partial(ddp, factor=factor), dtype=torch.float32)
    assert "rank 0 holds the right weights, but AdamW got wrong gradients, and hides their factor" in str(error)
    assert error.cause.startswith(cause)


def test_right_gradients_under_adam_pass(world):
    check_same_trajectory(ddp, plainly, net, world, dtype=torch.float32)


def test_a_scale_that_a_fused_optimizer_removes_is_no_factor(world):
    def scaled(model, steps):
        replica, scaler = DistributedDataParallel(model), torch.amp.GradScaler("cpu", init_scale=64.0)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for inputs, targets in batches(model, steps):
            adam.zero_grad()
            loss = nn.functional.mse_loss(replica(inputs[rank::ranks]), targets[rank::ranks])
            scaler.scale(loss).backward()
            scaler.step(adam)
            scaler.update()

    check_same_trajectory(scaled, plainly, net, world, dtype=torch.float32)


def test_gradients_are_those_that_hooks_of_the_optimizer_leave(world):
    def unscaled(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=True)

        def unscale(optimizer, args, kwargs):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad /= 64.0

        optimizer.register_step_pre_hook(unscale)
        return optimizer

    check_same_trajectory(
        functools.partial(ddp, factor=64.0, optimizer=unscaled), plainly, net, world, dtype=torch.float32
    )


def closing(model, steps, *, factor=1.0, optimizer=ADAM):
    """Train with a closure, as Lightning's Trainer does: the optimizer calls the backward pass."""
    replica, adam = DistributedDataParallel(model), optimizer(model.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def closure(inputs, targets):
        adam.zero_grad()
        (factor * nn.functional.mse_loss(replica(inputs[rank::ranks]), targets[rank::ranks])).backward()

    for batch in batches(model, steps):
        adam.step(functools.partial(closure, *batch))


def test_gradients_that_a_closure_computes_are_compared(world):
    check_same_trajectory(closing, plainly, net, world, dtype=torch.float32)
    error = rejected(world, functools.partial(closing, factor=2.0), dtype=torch.float32)
    assert error.cause.startswith("as world_size is 2: gradients are summed, not averaged, over ranks")
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    doubled = functools.partial(closing, factor=2.0, optimizer=sgd)
    error = rejected(world, doubled, functools.partial(plainly, optimizer=sgd))
    assert "the mean over ranks is taken, and the gradients of each rank are 2 times too large" in error.cause


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_that_is_called_several_times_is_one_step(by_name):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    inputs, targets = batches(model, 1)[0]
    lasts = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        lasts.append(model[2].bias.grad.clone())
        return loss

    with record_optimizers(model) as given:
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert len(lasts) > 1
    assert {one.steps for one in given.values()} == {1}
    assert torch.equal(given["parameter '2.bias'"].gradient, lasts[-1])


def test_an_optimizer_that_another_calls_for_its_own_parameters_keeps_its_steps():
    model = net()
    inner, outer = (torch.optim.SGD([one], lr=0.1) for one in (model[0].weight, model[2].weight))

    def closure():
        inner.step()
        return torch.zeros(())

    with record_optimizers(model) as given:
        for _ in range(3):
            outer.step(closure)
    assert {name: one.steps for name, one in given.items()} == {"parameter '0.weight'": 3, "parameter '2.weight'": 3}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_an_optimizer_within_an_optimizer_takes_one_step(world):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    def zero(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)

    check_same_trajectory(functools.partial(ddp, optimizer=zero), plainly, net, world)
    check_same_trajectory(functools.partial(closing, optimizer=zero), plainly, net, world)
    error = rejected(world, functools.partial(ddp, optimizer=zero, twice=True))
    assert error.cause.startswith("the optimizer took 2 steps, that of plainly 1: it steps in each micro-batch")


def test_a_schedule_that_steps_too_often_is_named_with_its_step(world):
    error = rejected(world, functools.partial(ddp, schedule=lambda step: 0.5**step))
    assert (
        "the gradients are right, and the optimizer has lr=0.005 for parameter '0.weight' in its step 2" in error.cause
    )
    assert error.cause.endswith("that of plainly lr=0.01")


def test_another_setting_is_named(world):
    decays = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    error = rejected(world, functools.partial(ddp, optimizer=decays))
    assert (
        "has weight_decay=0.5 for parameter '0.weight' in its step 1, that of plainly weight_decay=0.01" in error.cause
    )
    error = rejected(world, functools.partial(ddp, optimizer=functools.partial(torch.optim.Adam, lr=1e-2)))
    assert "the gradients are right, and the optimizer is Adam, that of plainly AdamW" in error.cause


def test_a_parameter_in_no_optimizer_is_named(world):
    error = rejected(world, functools.partial(ddp, left_out=("2.bias",)))
    assert error.cause == "no optimizer of this training updates parameter '2.bias', one of plainly does"


def test_a_parameter_whose_copy_is_trained_is_not_named(world):
    def train(model, steps):
        copy = nn.Parameter(model[2].weight.detach().clone())
        adam = ADAM([copy, *(one for name, one in model.named_parameters() if name != "2.weight")])
        for inputs, targets in batches(model, steps):
            adam.zero_grad()
            outputs = nn.functional.linear(model[:2](inputs), copy, model[2].bias)
            nn.functional.mse_loss(outputs, targets).backward()
            adam.step()
        model[2].weight.data[:, written:] = copy.detach()[:, written:]

    written = 0
    check_same_trajectory(train, plainly, net, world)
    written = 4
    error = rejected(world, train)
    assert error.cause.startswith("ranks agree, and 4 elements keep their start, while all others of these tensors are")


def test_a_parameter_without_a_gradient_is_named(world):
    error = rejected(world, functools.partial(ddp, frozen=("0.weight", "0.bias")))
    assert error.cause.startswith("the optimizer got no gradient of parameter '0.weight' and 1 more (.grad is None)")


@pytest.mark.parametrize(("left", "said"), [(1.0, True), (0.5, False)])
def test_gradients_of_the_step_before_are_told_from_a_part_of_them(world, left, said):
    def keeps(model, steps):
        adam, rank, ranks = ADAM(model.parameters()), dist.get_rank(), dist.get_world_size()
        for inputs, targets in batches(model, steps):
            nn.functional.mse_loss(model(inputs[rank::ranks]), targets[rank::ranks]).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
            adam.step()
            for parameter in model.parameters():
                parameter.grad *= left

    error = rejected(world, keeps)
    assert str(error.cause).startswith("the gradients of step 2 are the right ones and those of step 1 again") == said


def test_what_changes_weights_outside_of_the_step_is_not_put_down_to_it(world):
    def decays(model, steps):
        ddp(model, steps)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    error = rejected(world, decays)
    assert error.cause is None
    assert "the last gradients and the settings that the optimizer got are right" in str(error)


def test_the_number_of_steps_is_no_cause_where_a_checkpoint_is_loaded(world):
    def resumes(model, steps, *, factor=1.0, twice=False):
        earlier = copy.deepcopy(model)
        plainly(earlier, steps - 1)
        adam, state = ADAM(model.parameters()), earlier.state_dict()
        model.load_state_dict(state)
        ddp(model, 1, factor=factor, optimizer=lambda _: adam, twice=twice)

    error = rejected(world, functools.partial(resumes, twice=True), steps=1)
    assert error.cause.startswith("the optimizer took 2 steps, that of plainly 1")
    error = rejected(world, resumes, steps=2)
    assert "steps, that of plainly" not in str(error)
