"""Local SGD and related algorithms equal their definitions, computed by replicas in one process."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_local_sgd, check_same_start

from .training import ADAM, MOMENTUM, PLAIN, POLICIES, Stepper, backward, few, made, synchronous

NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
LINEAR = pytest.mark.parametrize("optimizer", [PLAIN, MOMENTUM, NESTEROV], ids=["plain", "momentum", "nesterov"])


@pytest.mark.verifies("LocalSGD")
@few
@given(
    sync_every=st.integers(1, 4),
    synchronous_steps=st.integers(0, 3),
    optimizer=st.sampled_from([MOMENTUM, NESTEROV, ADAM]),
    policies=POLICIES,
    world_size=st.integers(2, 4),
)
def test_local_sgd_is_what_replicas_in_one_process_do(
    subject, world, sync_every, synchronous_steps, optimizer, policies, world_size
):
    rule = {"sync_every": sync_every, "synchronous_steps": synchronous_steps, **policies}

    def local(optimizer, model):
        return subject(optimizer, model, **rule)

    check_local_sgd(local, world, optimizer=optimizer, world_size=world_size, steps=8, **rule)


@pytest.mark.verifies("LocalSGD")
@few
@given(
    sync_every=st.sampled_from([1, 2, 3, None]),
    synchronous_steps=st.integers(0, 4),
    optimizer=st.sampled_from([MOMENTUM, ADAM]),
    policies=POLICIES,
    steps=st.lists(st.integers(0, 6), min_size=2, max_size=4).filter(any),
)
def test_ranks_may_have_different_numbers_of_steps(
    subject, world, sync_every, synchronous_steps, optimizer, policies, steps
):
    rule = {"sync_every": sync_every, "synchronous_steps": synchronous_steps, **policies}

    def local(optimizer, model):
        return subject(optimizer, model, **rule)

    check_local_sgd(local, world, optimizer=optimizer, steps=steps, **rule)


@pytest.mark.if_subject_takes("buffers")
@pytest.mark.verifies("LocalSGD")
@pytest.mark.parametrize("sync_every", [1, 2, None])
def test_buffers_are_averaged_with_the_model(subject, world, sync_every):
    local = partial(subject, sync_every=sync_every, buffers="average")
    check_local_sgd(local, world, sync_every=sync_every, steps=[4, 4, 4], buffers="average")


@pytest.mark.if_subject_takes("synchronous_steps")
@pytest.mark.verifies("LocalSGD")
@pytest.mark.parametrize("steps", [6, [5, 3, 0, 4], [2, 6, 6, 1]], ids=str)
def test_nodes_are_one_replica_each(subject, world, steps):
    local = partial(subject, sync_every=2, synchronous_steps=1)
    nodes = [[0, 2], [3, 1]]
    check_local_sgd(
        local, world, sync_every=2, synchronous_steps=1, nodes=nodes, steps=steps, world_size=4, buffers="broadcast"
    )


@LINEAR
@pytest.mark.parametrize("momentum", ["keep", "average"])
@pytest.mark.verifies("LocalSGD")
def test_local_sgd_with_sync_every_1_takes_the_steps_of_synchronous_sgd(subject, world, optimizer, momentum):
    """The weights are equal; with "keep" each rank has its own momentum."""

    def weights(wrap):
        def train():
            model = made()
            trainer = wrap(optimizer(model.parameters()), model)
            for step in range(5):
                backward(model, step)
                trainer.step()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return world.run(train, world_size=3)

    local = weights(partial(subject, sync_every=1, momentum=momentum))
    for found, expected in zip(local, weights(synchronous), strict=True):
        assert (found - expected).abs().max() < 1e-13  # a few round-off errors of numbers near 1


@pytest.mark.verifies("LocalSGD")
def test_local_sgd_with_sync_every_1_and_adam_is_not_synchronous(subject, world):
    with pytest.raises(AssertionError, match="of parameter"):
        check_local_sgd(
            partial(subject, sync_every=1, momentum="average"),
            world,
            sync_every=None,
            gradients_every=1,
            buffers="keep",
            optimizer=ADAM,
        )


@pytest.mark.verifies("LocalSGD")
def test_averaged_adam_has_the_first_moment_of_synchronous_adam_and_a_larger_second_one(subject, world):
    """The gradients of every step do not depend on the weights."""

    def train(wrap):
        weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        model = nn.ParameterList([weight])
        optimizer = ADAM([weight])
        trainer = wrap(optimizer, model)
        for step in range(5):
            generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
            weight.grad = torch.randn(4, generator=generator, dtype=torch.float64)
            trainer.step()
        state = optimizer.state[weight]
        return state["exp_avg"], state["exp_avg_sq"]

    averaged = world.run(train, partial(subject, sync_every=1, momentum="average"), world_size=3)
    for (first, second), (first_moment, second_moment) in zip(
        averaged, world.run(train, synchronous, world_size=3), strict=True
    ):
        assert torch.allclose(first, first_moment, rtol=1e-12, atol=1e-15)
        assert (second > second_moment).all()
    assert all(torch.equal(one, other) for pair in averaged for one, other in zip(pair, averaged[0], strict=True))


@pytest.mark.verifies("LocalSGD")
@pytest.mark.world_size(2)
def test_a_rank_without_momentum_of_a_parameter_counts_as_zero_and_gets_it(subject, rank):
    model = nn.ParameterList([torch.zeros(()), torch.zeros(3)])
    optimizer = ADAM(model.parameters())
    local = subject(optimizer, model, sync_every=1, momentum="average")
    model[0].grad = torch.tensor(2.0)
    if rank == 0:
        model[1].grad = torch.ones(3)
    local.step()
    state = optimizer.state[model[1]]
    assert state["exp_avg"].tolist() == pytest.approx([0.05] * 3)  # half of (1 - 0.9) * 1
    assert state["step"] == 1
    assert optimizer.state[model[0]]["exp_avg"].item() == pytest.approx(0.2)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    local.step()
    assert optimizer.state[model[1]]["step"] == 2


@pytest.mark.verifies("LocalSGD")
@pytest.mark.world_size(3)
def test_a_step_that_a_loss_scaler_skips_is_counted(subject, rank):
    model = nn.Linear(2, 1)
    optimizer = PLAIN(model.parameters())
    local = subject(optimizer, model, sync_every=3)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    met = [local.step(optimizer.step if rank else lambda: None) for _ in range(6)]
    assert met == [False, False, True, False, False, True]


@pytest.mark.verifies("LocalSGD")
def test_replicas_of_local_sgd_start_alike(subject, world):
    def start():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        subject(PLAIN(model.parameters()), model, sync_every=2)
        return model

    check_same_start(start, world)


@pytest.mark.verifies("LocalSGD")
@pytest.mark.world_size(3)
def test_a_round_keeps_the_sum_of_the_models(subject, rank):
    model = nn.Linear(2, 2).double()
    local = subject(PLAIN(model.parameters()), model, sync_every=1)
    with torch.no_grad():
        model.weight.fill_(rank - 4.0)
        model.bias.fill_(2.0)
    local.step(lambda: None)
    assert model.weight.tolist() == [[-3.0, -3.0]] * 2
    assert model.bias.tolist() == [2.0, 2.0]


@pytest.mark.verifies("LocalSGD")
@pytest.mark.world_size(2)
def test_finish_without_a_step_changes_nothing(subject, rank):
    model = nn.Linear(2, 1)
    before = copy.deepcopy(model.state_dict())
    local = subject(MOMENTUM(model.parameters()), model, sync_every=2)
    first = copy.deepcopy(model.state_dict())
    local.finish()
    local.finish()
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())
    assert rank or all(torch.equal(before[name], value) for name, value in first.items())


@pytest.mark.verifies("LocalSGD")
@pytest.mark.world_size(2)
def test_rounds_work_in_bfloat16(subject, rank):
    model = nn.Linear(1, 1, bias=False).bfloat16()
    local = subject(PLAIN(model.parameters()), model, sync_every=1)
    with torch.no_grad():
        model.weight.fill_(1.0 if rank else 1.0078125)  # neighbours: the mean is a tie, and rounds to even
    local.step(lambda: None)
    assert (model.weight.dtype, model.weight.item()) == (torch.bfloat16, 1.0)


# gradients at every k-th step


@pytest.mark.if_subject_takes("step", "sync_every")
@pytest.mark.verifies("sync_gradients")
@few
@given(k=st.sampled_from([1, 2, 4, 10]), optimizer=st.sampled_from([MOMENTUM, ADAM]))
def test_training_with_gradients_synchronised_at_every_kth_step(subject, world, k, optimizer):
    """The numbers k are those of D. Gannon (2020): 1, 2, 4, 10; in between, replicas take their own steps."""

    def every_kth(optimizer, model):
        def step():
            subject(model, sync_every=k, step=trainer.taken)
            optimizer.step()
            trainer.taken += 1

        trainer = Stepper(step)
        trainer.taken = 0
        return trainer

    check_local_sgd(every_kth, world, sync_every=None, gradients_every=k, optimizer=optimizer, buffers="keep", steps=11)


@pytest.mark.if_subject_takes("step", "sync_every")
@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_gradients_are_never_synchronised_where_nothing_is_asked_for(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([float(rank)])
    assert not any(subject([weight], sync_every=None, step=step) for step in range(20))
    assert weight.grad.item() == rank


@pytest.mark.if_subject_takes("step", "sync_every")
@pytest.mark.verifies("sync_gradients")
@given(k=st.sampled_from([1, 2, 4, 10]), steps=st.integers(1, 12))
@few
def test_replicas_drift_apart_by_the_steps_that_they_took_alone(subject, world, k, steps):
    """The gradients do not depend on the weights: rank r has gradient r."""

    def weight():
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        for step in range(steps):
            parameter.grad = torch.full((1,), float(dist.get_rank()), dtype=torch.float64)
            subject([parameter], sync_every=k, step=step)
            optimizer.step()
        return parameter.item()

    zero, one, two = world.run(weight, world_size=3)
    alone = steps - steps // k
    assert (zero - one, zero - two) == (0.5 * alone, 2 * 0.5 * alone)


@pytest.mark.if_subject_takes("buffers")
@pytest.mark.verifies("average_parameters")
@few
@given(every=st.integers(1, 4), buffers=st.sampled_from(["keep", "broadcast", "average"]))
def test_models_averaged_at_every_mth_step(subject, world, every, buffers):
    def averaging(optimizer, model):
        def step():
            optimizer.step()
            trainer.taken += 1
            if trainer.taken % every == 0:
                subject(model, buffers=buffers)

        trainer = Stepper(step)
        trainer.taken = 0
        return trainer

    check_local_sgd(averaging, world, sync_every=every, buffers=buffers)
