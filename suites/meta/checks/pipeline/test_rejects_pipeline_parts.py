"""The check of a pipeline handles frozen layers, losses without outputs, parts, and replicas that drift apart."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_pipeline
from pdlcheck.errors import CheckFailed

MSE = nn.functional.mse_loss
GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(4, 3, generator=GENERATOR), torch.randn(4, 2, generator=GENERATOR)) for _ in range(3)]


def frozen():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    return model


class Stage(nn.Module):
    """A stage with the layer of this rank's number, under its name in the model."""

    def __init__(self, model, *, fills=False):
        super().__init__()
        self.rank, self.fills = dist.get_rank(), fills
        self.add_module(str(self.rank), model[self.rank])

    def step(self, inputs, targets):
        layer = self.get_submodule(str(self.rank))
        if self.rank == 0:
            sent = layer(inputs)
            dist.send(sent.detach(), 1)
            grad = torch.empty_like(sent)
            dist.recv(grad, 1)
            sent.backward(grad)
            if self.fills:
                layer.weight.grad = torch.zeros_like(layer.weight)
            return None
        received = torch.empty(len(inputs), 4, dtype=torch.float64)
        dist.recv(received, 0)
        received.requires_grad_()
        outputs = layer(received)
        loss = MSE(outputs, targets)
        loss.backward()
        dist.send(received.grad, 0)
        return loss.detach(), outputs.detach()


def check(start, make, world, **keywords):
    check_pipeline(start, make, MSE, BATCHES, world, world_size=2, n_microbatches=1, **keywords)


@pytest.mark.parametrize(
    ("ahead", "change", "cause"),
    [
        (
            1,
            lambda x: x,
            "every micro-batch has the outputs of the one 1 later in the data: a stage is 1 micro-batch ahead",
        ),
        (
            2,
            lambda x: x,
            "every micro-batch has the outputs of the one 2 later in the data: a stage is 2 micro-batches ",
        ),
        (0, lambda x: x.flip(0), "the outputs are right and stand at other samples, in the order [3, 2, 1, 0]"),
        (1, lambda x: 2 * x, None),
    ],
)
def test_a_stage_that_is_ahead_in_its_data_is_told(world, ahead, change, cause):
    def start(model):
        stage = Stage(model)
        inputs = islice(cycle([x.double() for x, _ in BATCHES]), ahead, None)
        return stage, lambda _, targets: stage.step(change(next(inputs)), targets)

    with pytest.raises(CheckFailed) as raised:
        check(start, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), world)
    assert raised.value.cause is None if cause is None else raised.value.cause.startswith(cause)


def linear():
    return nn.Linear(3, 2)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_frozen_weight_stays_where_it_is(world, optimizer):
    def start(model):
        stage = Stage(model)
        return stage, stage.step

    check(start, frozen, world, optimizer=lambda params: optimizer(params, lr=0.1))


def test_a_frozen_weight_that_the_optimizer_decays_is_named(world):
    def start(model):
        stage = Stage(model, fills=True)
        return stage, stage.step

    with pytest.raises(
        AssertionError,
        match=r"in step 0: rank 0 ends with \S+ at \(0, 0\) of parameter '0.weight', right is \S+\n"
        "  likely cause  one process has no gradient there; zeros are one",
    ):
        check(start, frozen, world, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))


def test_a_step_that_steps_an_optimizer_of_its_own_is_named(world):
    def start(model):
        stage = Stage(model)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

        def step(*batch):
            result = stage.step(*batch)
            optimizer.step()
            return result

        return stage, step

    with pytest.raises(
        AssertionError,
        match=r"in step 0: rank 0 ends with .* of parameter '0.weight'.*\n"
        "  likely cause  its gradient is right: step changes weights itself",
    ):
        check(start, lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), world)


def loss_alone(factor):
    def start(model):
        def step(inputs, targets):
            loss = MSE(model(inputs), targets)
            loss.backward()
            return (factor * loss.detach(), None) if dist.get_rank() else None

        return model, step

    return start


def test_a_step_may_return_its_loss_alone(world):
    check(loss_alone(1), linear, world)
    with pytest.raises(AssertionError, match=r"in step 0 rank 1 returns the loss \S+, one process has"):
        check(loss_alone(4), linear, world)


def replicas(join):
    """Return replicas that take half of the batch each."""

    def start(model):
        def step(inputs, targets):
            own = (tensor.chunk(2)[dist.get_rank()] for tensor in (inputs, targets))
            inputs, targets = own
            MSE(model(inputs), targets).backward()
            for parameter in model.parameters():
                join(parameter.grad)

        return model, step

    return start


def mean(grad):
    dist.all_reduce(grad)
    grad /= dist.get_world_size()


def test_replicas_that_keep_their_own_gradients_are_told(world):
    check(replicas(mean), linear, world, results=False)
    with pytest.raises(AssertionError, match=r"own part: 2 ranks hold the parameter, and the mean of theirs is right"):
        check(replicas(lambda grad: None), linear, world, results=False)


def test_a_part_of_a_parameter_is_named(world):
    def start(model):
        rank, own = dist.get_rank(), nn.Linear(3, 1).double()
        own.load_state_dict({name: value[rank : rank + 1] for name, value in model.state_dict().items()})

        def step(inputs, targets):
            (MSE(own(inputs), targets[:, rank : rank + 1]) / 2).backward()

        return own, step

    with pytest.raises(
        AssertionError, match=r"rank 0 holds 'weight' in shape \(1, 3\), in the model it is of shape \(2"
    ):
        check(start, linear, world, results=False)


def times(x, weights, biases):
    return x @ weights.weight.t() + biases.bias


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.skip, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.merge(torch.tanh(times(x, self.embed, self.embed)), times(x, self.skip, self.skip))

    def merge(self, hidden, residual):
        return self.head(hidden + residual.square())


def without_its_tanh(x, model):
    return model[2](model[0](x))


@pytest.mark.parametrize(
    ("make", "forward", "told"),
    [
        (
            Residual,
            lambda x, model: model.merge(times(x, *[model.skip] * 2), torch.tanh(times(x, *[model.embed] * 2))),
            "two tensors of one shape are exchanged, tanh and add: two messages without tags are received in another",
        ),
        (
            Residual,
            lambda x, model: model.merge(*[torch.tanh(times(x, *[model.embed] * 2))] * 2),
            "no known cause fits; excluded: .* and 2 more",
        ),
        (
            Residual,
            lambda x, model: model.merge(
                torch.tanh(times(x, model.skip, model.embed)), times(x, model.embed, model.skip)
            ),
            "two tensors of one shape are exchanged, matmul and matmul: .*, or layers of one shape are exchanged",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
            without_its_tanh,
            "no known cause fits; excluded: .* and 2 more",
        ),
    ],
    ids=["exchanged", "one of them twice", "weights exchanged", "a layer left out"],
)
def test_tensors_that_change_places_on_their_way_are_named(world, make, forward, told):
    def start(model):
        if dist.get_rank() == 0:
            return model, lambda x, y: None
        return nn.Module(), lambda x, y: (MSE(out := forward(x, model), y), out)

    with pytest.raises(AssertionError, match=f"in step 0 rank 1 returns with [^$]*likely cause +{told}"):
        check(start, make, world)
