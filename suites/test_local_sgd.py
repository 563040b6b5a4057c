"""Local SGD, its policies, and DiLoCo: what they keep and lose, step by step."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_local_sgd, check_same_start
from pdlcheck.primitives import sync_gradients

PLAIN = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
ADAM = partial(torch.optim.Adam, lr=0.05)
LINEAR = pytest.mark.parametrize("optimizer", [PLAIN, MOMENTUM, NESTEROV], ids=["plain", "momentum", "nesterov"])
few = settings(max_examples=6)
POLICIES = st.fixed_dictionaries(
    {"momentum": st.sampled_from(["keep", "average", "reset"]), "buffers": st.sampled_from(["keep", "broadcast"])}
)


class Stepper:
    """Anything with a step."""

    def __init__(self, step):
        self.step = step


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


@pytest.mark.verifies("LocalSGD")
@pytest.mark.parametrize("sync_every", [1, 2, None])
def test_buffers_are_averaged_with_the_model(subject, world, sync_every):
    local = partial(subject, sync_every=sync_every, buffers="average")
    check_local_sgd(local, world, sync_every=sync_every, steps=[4, 4, 4], buffers="average")


@pytest.mark.verifies("LocalSGD")
@pytest.mark.parametrize("steps", [6, [5, 3, 0, 4], [2, 6, 6, 1]], ids=str)
def test_nodes_are_one_replica_each(subject, world, steps):
    local = partial(subject, sync_every=2, synchronous_steps=1)
    nodes = [[0, 2], [3, 1]]
    check_local_sgd(local, world, sync_every=2, synchronous_steps=1, nodes=nodes, steps=steps, world_size=4)


@LINEAR
@pytest.mark.parametrize("momentum", ["keep", "average"])
@pytest.mark.verifies("LocalSGD")
def test_local_sgd_with_sync_every_1_takes_the_steps_of_synchronous_sgd(subject, world, optimizer, momentum):
    """Its weights, that is; each rank's momentum is its own with "keep"."""

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
        assert (found - expected).abs().max() < 1e-13  # a few round-offs of numbers near 1


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
    """Where gradients do not depend on the weights, in every step."""

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
        model.weight.fill_(1.0 if rank else 1.0078125)  # neighbours; the mean is a tie, and rounds to even
    local.step(lambda: None)
    assert (model.weight.dtype, model.weight.item()) == (torch.bfloat16, 1.0)


# DiLoCo


OUTERS = [(1.0, 0.0, False), (0.7, 0.9, True), (0.5, 0.5, False)]


@pytest.mark.verifies("DiLoCo")
@few
@given(
    sync_every=st.integers(1, 4),
    outer=st.sampled_from(OUTERS),
    optimizer=st.sampled_from([MOMENTUM, ADAM]),
    policies=POLICIES,
    steps=st.one_of(st.just(7), st.lists(st.integers(0, 6), min_size=2, max_size=4).filter(any)),
)
def test_diloco_is_what_its_paper_says(subject, world, sync_every, outer, optimizer, policies, steps):
    diloco = partial(subject, sync_every=sync_every, outer=sgd(outer), **policies)
    rule = {"sync_every": sync_every, "outer": outer, **policies}
    check_local_sgd(diloco, world, optimizer=optimizer, steps=steps, **rule)


@pytest.mark.verifies("DiLoCo")
def test_diloco_takes_nodes_as_replicas(subject, world):
    diloco = partial(subject, sync_every=2, outer=sgd(OUTERS[1]))
    check_local_sgd(diloco, world, sync_every=2, outer=OUTERS[1], nodes=[[0, 1], [2]], steps=5)


@pytest.mark.verifies("DiLoCo")
@pytest.mark.parametrize("steps", [6, [5, 2, 3]], ids=str)
def test_diloco_with_an_outer_rate_of_1_and_no_momentum_is_local_sgd(subject, world, steps):
    check_local_sgd(partial(subject, sync_every=2, outer=sgd((1.0, 0.0, False))), world, sync_every=2, steps=steps)


@pytest.mark.verifies("DiLoCo")
@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_in_every_step_over_plain_sgd_is_synchronous_sgd_with_momentum(subject, world, nesterov):
    """Of the product of the rates."""

    def weights(wrap, optimizer):
        def train():
            model = made()
            trainer = wrap(optimizer(model.parameters()), model)
            for step in range(6):
                backward(model, step)
                trainer.step()
            return nn.utils.parameters_to_vector(model.parameters()).detach()

        return world.run(train, world_size=3)

    diloco = weights(partial(subject, sync_every=1, outer=sgd((0.7, 0.9, nesterov))), PLAIN)
    product = partial(torch.optim.SGD, lr=0.07, momentum=0.9, nesterov=nesterov)
    for found, expected in zip(diloco, weights(synchronous, product), strict=True):
        assert (found - expected).abs().max() < 1e-13


# gradients at every k-th step


@pytest.mark.verifies("sync_gradients")
@few
@given(k=st.sampled_from([1, 2, 4, 10]), optimizer=st.sampled_from([MOMENTUM, ADAM]))
def test_training_with_gradients_synchronised_at_every_kth_step(subject, world, k, optimizer):
    """k = 1, 2, 4, 10, as D. Gannon (2020) has them; in between, replicas take their own steps."""

    def every_kth(optimizer, model):
        def step():
            subject(model, sync_every=k, step=trainer.taken)
            optimizer.step()
            trainer.taken += 1

        trainer = Stepper(step)
        trainer.taken = 0
        return trainer

    check_local_sgd(
        every_kth, world, sync_every=None, gradients_every=k, optimizer=optimizer, buffers="keep", steps=11
    )


@pytest.mark.verifies("sync_gradients")
@pytest.mark.world_size(2)
def test_gradients_are_never_synchronised_where_nothing_is_asked_for(subject, rank):
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([float(rank)])
    assert not any(subject([weight], sync_every=None, step=step) for step in range(20))
    assert weight.grad.item() == rank


@pytest.mark.verifies("sync_gradients")
@given(k=st.sampled_from([1, 2, 4, 10]), steps=st.integers(1, 12))
@few
def test_replicas_drift_apart_by_the_steps_that_they_took_alone(subject, world, k, steps):
    """With gradients that do not depend on the weights: rank r has gradient r."""

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


# saved and restored


def outer_of_paper(subject):
    return {"outer": sgd(OUTERS[1])} if subject.__name__ == "DiLoCo" else {"momentum": "average"}


BOTH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.verifies(name), id=name) for name in ("DiLoCo", "LocalSGD")]
)


@BOTH
@pytest.mark.world_size(2)
@pytest.mark.parametrize("saved_at", [3, 4])
def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(name, subject, saved_at, tmp_path):
    def train(first, last, resume):
        model = made()
        optimizer = MOMENTUM(model.parameters())
        trainer = subject(optimizer, model, sync_every=3, **outer_of_paper(subject))
        everything = {"model": model, "optimizer": optimizer, "trainer": trainer}
        if resume:
            saved = torch.load(tmp_path / "saved", weights_only=True)
            for part, value in everything.items():
                value.load_state_dict(saved[part])
        for step in range(first, last):
            backward(model, step)
            trainer.step()
        torch.save({part: value.state_dict() for part, value in everything.items()}, tmp_path / "saved")
        return nn.utils.parameters_to_vector(model.parameters())

    expected = train(0, 8, resume=False)
    train(0, saved_at, resume=False)
    assert torch.equal(train(saved_at, 8, resume=True), expected)


# what is refused


@BOTH
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sync_every": 0}, "needs sync_every of at least 1, got sync_every=0"),
        ({"sync_every": 1, "momentum": "mean"}, "knows momentum 'average', 'keep' and 'reset', got 'mean'"),
        ({"sync_every": 1, "buffers": "drop"}, "knows buffers 'average', 'broadcast' and 'keep', got 'drop'"),
    ],
    ids=["sync_every", "momentum", "buffers"],
)
def test_wrong_arguments_are_refused(name, subject, keywords, message):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=f"{name} {message}$"):
        subject(PLAIN(model.parameters()), model, **keywords)


@BOTH
@pytest.mark.world_size(3)
def test_what_is_wrong_on_one_rank_is_refused_on_all(name, subject, rank):
    model = nn.Linear(1, 1)
    optimizer = PLAIN(model.parameters())
    with pytest.raises(ValueError, match=rf"{name} needs sync_every of at least 1, got sync_every=-1 \(on rank 1\)"):
        subject(optimizer, model, sync_every=-1 if rank == 1 else 2)
    with pytest.raises(ValueError, match=f"{name} needs the same sync_every on every rank, got 2 on rank 0 and 3 on r"):
        subject(optimizer, model, sync_every=3 if rank == 2 else 2)
    with pytest.raises(ValueError, match="the same kind of optimizer on every rank, got SGD on rank 0 and Adam on ran"):
        subject(ADAM(model.parameters()) if rank == 2 else optimizer, model, sync_every=2)
    other = nn.Linear(2, 1) if rank == 2 else model
    with pytest.raises(ValueError, match=r"the same model on every rank, got .*'weight': .*on rank 2"):
        subject(PLAIN(other.parameters()), other, sync_every=2)
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    with pytest.raises(ValueError, match="needs every rank of the group in one node_group"):
        subject(optimizer, model, sync_every=2, node_group=None if rank == 2 else groups[0])


@BOTH
@pytest.mark.world_size(2)
def test_an_optimizer_of_another_model_is_refused(name, subject):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=f"{name} got an optimizer of another model: its parameter 0 is not one of"):
        subject(PLAIN(copy.deepcopy(model).parameters()), model, sync_every=2)
    with pytest.raises(TypeError, match=f"{name} takes a torch.optim.Optimizer first, got Linear"):
        subject(model, model, sync_every=2)
    with pytest.raises(ValueError, match=f"{name} got an empty model"):
        subject(PLAIN(model.parameters()), nn.ReLU(), sync_every=2)


@BOTH
@pytest.mark.world_size(3)
def test_a_model_that_one_rank_changed_after_wrapping_is_refused_on_all(name, subject, rank):
    model = nn.Linear(1, 1)
    trainer = subject(PLAIN(model.parameters()), model, sync_every=2)
    if rank == 1:
        model.weight = nn.Parameter(torch.zeros(2, 1))
    trainer.step()
    with pytest.raises(ValueError, match=f"{name} found other parameters than those .* on 1 of 3 ranks"):
        trainer.step()


@BOTH
@pytest.mark.world_size(2)
def test_a_state_of_something_else_is_refused(name, subject, rank):
    model = nn.Linear(1, 1)
    trainer = subject(PLAIN(model.parameters()), model, sync_every=2)
    saved = trainer.state_dict()
    caller = f"{name}.load_state_dict"
    with pytest.raises(ValueError, match=f"{caller} needs a state with sync_every=2, got 4; make it as the one"):
        trainer.load_state_dict(saved | {"sync_every": 4})
    with pytest.raises(ValueError, match=f"{caller} needs a state with format=1, got 2"):
        trainer.load_state_dict(saved | {"format": 2})
    with pytest.raises(ValueError, match=f"{caller} needs a state with format=1, got nothing.*on rank 1"):
        trainer.load_state_dict({} if rank else saved)


@pytest.mark.verifies("DiLoCo")
@pytest.mark.world_size(2)
def test_diloco_refuses(subject, rank):
    model = nn.Linear(1, 1)
    optimizer = PLAIN(model.parameters())
    with pytest.raises(ValueError, match=r"needs the same outer optimizer on every rank, got SGD.*lr=0\.5.*lr=1"):
        subject(optimizer, model, sync_every=2, outer=sgd((1.0 if rank else 0.5, 0.0, False)))
    with pytest.raises(TypeError, match="DiLoCo takes outer as a maker of an optimizer, it made str"):
        subject(optimizer, model, sync_every=2, outer=str)
    diloco = subject(optimizer, model, sync_every=2)
    saved = diloco.state_dict()
    saved["reference"] = {"weight": torch.zeros(3, 1)}
    with pytest.raises(ValueError, match="got the reference of another model: 'bias' has shape None there and"):
        diloco.load_state_dict(saved)


# what the tests train


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def backward(model, step):
    """Of samples that differ from rank to rank and step to step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()


def synchronous(optimizer, model):
    def step():
        sync_gradients(model)
        optimizer.step()

    return Stepper(step)


def sgd(outer):
    lr, momentum, nesterov = outer
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov)
