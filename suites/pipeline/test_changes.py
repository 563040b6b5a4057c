"""Changes in the layers of a pipeline after it was made are refused by the next step, or accepted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from .models import MSE, SGD, errors, samples, side_by_side, tanh_net, tied_net

pytestmark = pytest.mark.verifies("Pipeline")


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def first(module):
    """Return the name and the layer of the first linear layer of a rank."""
    return next((name, layer) for name, layer in module.named_children() if isinstance(layer, nn.Linear))


def replace_layer(module):
    setattr(module, first(module)[0], nn.Linear(3, 3))


def replace_tanh(module):
    module._modules["5"] = nn.ReLU()


def replace_weight(module):
    first(module)[1].weight = nn.Parameter(torch.zeros(3, 3))


def assign(module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


def resize(module):
    first(module)[1].weight.data = torch.zeros(3, 5)


def grow(module):
    """Add a parameter inside a layer."""
    first(module)[1].register_parameter("scale", nn.Parameter(torch.ones(1)))


def parametrized(module):
    parametrize.register_parametrization(first(module)[1], "weight", Twice())


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("backward", [True, False], ids=["step", "infer"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_layer, "layer '4' was replaced after the pipeline was made"),
        (replace_tanh, "layer '5' was replaced after"),
        (lambda module: module.add_module("8", nn.Tanh()), "layer '8' was added after"),
        (lambda module: delattr(module, "7"), "layer '7' was removed after"),
        (replace_weight, "parameter '4.weight' was replaced by another one after"),
        (assign, "parameter '4.weight' was replaced by another one after"),
        (resize, "parameter '4.weight' was resized from (3, 3) to (3, 5) after"),
        (grow, "parameter '4.scale' was added after"),
        (parametrized, "parameter '4.weight' was moved to '4.parametrizations.weight.original' after"),
        (lambda module: module.to("meta"), "parameter '4.weight' was "),
    ],
    ids=["layer", "tanh", "added", "removed", "weight", "assigned", "resized", "grown", "parametrized", "moved"],
)
def test_a_change_on_one_rank_is_refused_on_every_rank(subject, world, change, message, backward):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        take = pipeline.step if backward else pipeline.infer
        take(*samples(4))
        before = [p.grad for p in pipeline.module.parameters()]
        if rank:
            change(pipeline.module)
        for _ in range(2):
            with pytest.raises(ValueError, match="make the pipeline anew"):
                take(*samples(4))
        assert rank or [p.grad for p in pipeline.module.parameters()] == before
        take(*samples(4))

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith(f"ValueError: Pipeline: {message}")


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("where", [[0, 1], [1]], ids=["everywhere", "on rank 1"])
def test_a_tied_weight_that_is_replaced_is_refused_on_every_rank(subject, world, where):
    """Otherwise the copies of the weight would drift apart."""

    def program(rank):
        pipeline = subject(tied_net(), MSE, n_microbatches=2, split=[2])
        pipeline.step(*samples(4))
        if rank in where:
            (layer,) = (layer for name, layer in pipeline.module.named_children() if name == ("4" if rank else "0"))
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        pipeline.step(*samples(4))

    found = errors(world, program)
    assert len(set(found)) == 1
    assert "Pipeline: parameter" in found[0]
    assert "was replaced by another one after the pipeline was made" in found[0]


@pytest.mark.parametrize("pipeline_of_the_change", [0, 1])
def test_a_change_in_one_pipeline_reaches_the_ranks_of_the_other(subject, world, pipeline_of_the_change):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2, **side_by_side(rank))
        pipeline.step(*samples(4))
        if rank == 2 * pipeline_of_the_change + 1:
            resize(pipeline.module)
        pipeline.step(*samples(4))

    found = errors(world, program, 4)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: Pipeline: parameter '4.weight' was resized from (3, 3) to (3, 5) after")


KINDS = {
    "tied": (tied_net, {}, "4.weight", 2),
    "side by side": (tanh_net, {}, "4.weight", 4),
    "pipedream": (tanh_net, {"schedule": "pipedream", "optimizer": SGD}, "4.weight", 2),
}


@pytest.mark.parametrize(("make", "keywords", "name", "world_size"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("change", ["frozen", "cast"])
def test_weights_whose_gradients_leave_their_stage_stay_as_they_are(
    subject, world, make, keywords, name, world_size, change
):
    def program(rank):
        groups = side_by_side(rank) if world_size == 4 else {}
        pipeline = subject(make(), MSE, n_microbatches=2, split=[4], **keywords, **groups)
        pipeline.step(*samples(4))
        if rank == world_size - 1:
            if change == "frozen":
                pipeline.module.requires_grad_(False)
            else:
                pipeline.module.double()
        pipeline.step(*samples(4))

    found = errors(world, program, world_size)
    assert len(set(found)) == 1
    assert found[0].startswith(f"ValueError: Pipeline: parameter '{name}' was {change} ")


def test_a_stage_may_be_frozen_and_thawed(subject, world):
    def train():
        rank = dist.get_rank()
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        grads = []
        for trained in (True, False, True):
            pipeline.module.requires_grad_(trained or rank == 1)
            pipeline.module.zero_grad()
            pipeline.step(*samples(4))
            grads.append(all(p.grad is not None for p in pipeline.module.parameters()))
        return grads

    assert world.run(train, world_size=2) == [[True, False, True], [True] * 3]


def test_a_model_that_is_cast_on_every_rank_goes_on_in_its_dtype(subject, world):
    x, y = samples(6)

    def train():
        torch.manual_seed(0)
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        pipeline.step(x, y)
        pipeline.module.double().zero_grad()
        result = pipeline.step(x.double(), y.double())
        pipeline.module.float()
        pipeline.infer(x, y)
        return result.outputs

    torch.manual_seed(0)
    _, outputs = world.run(train, world_size=2)
    assert torch.allclose(outputs, tanh_net().double()(x.double()))


@pytest.mark.beyond_contract("error messages")
@pytest.mark.parametrize("layers", [["4", "6"], ["6"]], ids=["all", "not the first"])
def test_layers_that_are_cast_and_no_longer_fit_are_refused_on_every_rank(subject, world, layers):
    def program(rank):
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        pipeline.step(*samples(4))
        for name, layer in pipeline.module.named_children():
            if name in layers:
                layer.double()
        pipeline.step(*samples(4))

    found = errors(world, program)
    assert len(set(found)) == 1
    assert found[0].startswith("ValueError: stage 1 cannot take what stage 0 returns, float32 (2, 3): RuntimeError")


@pytest.mark.parametrize("make", [tanh_net, tied_net])
def test_steps_and_state_dicts_are_no_changes(subject, world, make):
    """Nor are modes, hooks, nested layers without weights, values set in place, and parametrized layers."""

    def train():
        torch.manual_seed(0)
        model = make()
        parametrize.register_parametrization(model[2], "weight", Twice())
        inner = nn.Sequential(model[3], nn.Dropout(0.5))
        model[3] = inner
        pipeline = subject(model, MSE, n_microbatches=2)
        optimizer = torch.optim.Adam(pipeline.module.parameters(), lr=0.1)
        state = {name: value.clone() for name, value in pipeline.module.state_dict().items()}
        for number in range(3):
            optimizer.zero_grad(set_to_none=bool(number))
            pipeline.step(*samples(4))
            optimizer.step()
        pipeline.module.load_state_dict(state)
        inner[1] = nn.Identity()
        pipeline.module.eval()
        pipeline.module.register_forward_hook(lambda *args: None)
        for parameter in pipeline.module.parameters():
            parameter.data = parameter.data.clone()
        pipeline.step(*samples(4))
        return all(torch.equal(value, state[name]) for name, value in pipeline.module.state_dict().items())

    assert world.run(train, world_size=2) == [True, True]


@pytest.mark.beyond_contract("error messages")
def test_a_change_that_is_taken_back_is_none(subject, world):
    def train():
        pipeline = subject(tanh_net(), MSE, n_microbatches=2)
        name, layer = first(pipeline.module)
        setattr(pipeline.module, name, nn.Linear(3, 3))
        with pytest.raises(ValueError, match="layer '0' was replaced after"):
            pipeline.step(*samples(4))
        setattr(pipeline.module, name, layer)
        pipeline.step(*samples(4))
        return all(p.grad is not None for p in pipeline.module.parameters())

    assert world.run(train, world_size=2) == [True, True]


@pytest.mark.beyond_contract("error messages")
def test_devices_of_one_process_see_changes_too(subject):
    pipeline = subject(tanh_net(), MSE, devices=["cpu"] * 2, n_microbatches=2)
    pipeline.step(*samples(4))
    pipeline.module._modules["4"] = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="layer '4' was replaced after the pipeline was made; make the pipeline anew"):
        pipeline.step(*samples(4))
