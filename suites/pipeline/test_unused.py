"""A parameter that gets no gradient in one process has none in a pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .models import MSE, samples, side_by_side

pytestmark = pytest.mark.verifies("Pipeline")


class Cut(nn.Linear):
    """A layer that passes no gradient to its input."""

    def forward(self, x):
        return super().forward(x.detach())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, given):
        x, y = given if isinstance(given, tuple) else (given, given)
        return self.one(x), self.other(y)


class First(nn.Linear):
    """A layer that reads one of two inputs."""

    def forward(self, pair):
        return super().forward(pair[0])


class Sometimes(nn.Linear):
    """A layer that reads its second input in some micro-batches, and never on zeros."""

    def forward(self, pair):
        x, y = pair
        return super().forward(x) + (y if y.sum() > 0 else 0)


class Holds(nn.Linear):
    """A layer with a parameter that others share, and that it may use."""

    def __init__(self, shared, *, uses):
        super().__init__(3, 3)
        self.shared, self.uses = shared, uses

    def forward(self, x):
        return super().forward(x) + self.shared.sum() if self.uses else super().forward(x)


def tied(*uses):
    shared = nn.Parameter(torch.ones(2))
    return nn.Sequential(*(Holds(shared, uses=used) for used in uses))


def bare(layer):
    """Remove the bias, so that zeros stay zeros."""
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            part.bias = None
    return layer


MODELS = {
    "first of two": lambda: nn.Sequential(Pair(), Pair(), First(3, 3), nn.Linear(3, 3)),
    "never": lambda: nn.Sequential(bare(Pair()), Pair(), First(3, 3), Cut(3, 3)),
    "sometimes": lambda: bare(nn.Sequential(nn.Linear(3, 3), Pair(), Sometimes(3, 3), nn.Linear(3, 3))),
    "tied, never": lambda: tied(False, False, False, False),
    "tied, in one stage": lambda: tied(False, False, False, True),
}


def model_of(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def require_same_gradients(module, alone):
    expected = dict(alone.named_parameters(remove_duplicate=False))
    for name, p in module.named_parameters():
        goal = expected[name].grad
        assert (p.grad is None) == (goal is None), name
        if goal is not None:
            torch.testing.assert_close(p.grad, goal, msg=name)


@pytest.mark.if_subject_takes("recompute")
@pytest.mark.world_size(2, 4)
@pytest.mark.parametrize(("schedule", "recompute"), [("gpipe", False), ("1f1b", True), ("interleaved", False)])
@pytest.mark.parametrize("kind", MODELS)
def test_a_parameter_that_gets_no_gradient_keeps_none(subject, world_size, schedule, kind, recompute):
    stages = {"stages_per_rank": 1} if schedule == "interleaved" and world_size == 4 else {}
    cuts = [1, 2, 3] if world_size == 4 or schedule == "interleaved" else [2]
    batch, model = samples(8), model_of(kind)
    alone = copy.deepcopy(model)
    pipeline = subject(model, MSE, schedule=schedule, n_microbatches=4, split=cuts, recompute=recompute, **stages)
    for _ in range(2):  # gradients accumulate
        pipeline.step(*batch)
        for x, y in zip(*(part.split(2) for part in batch), strict=True):
            (MSE(alone(x), y) / 4).backward()
    require_same_gradients(pipeline.module, alone)


@pytest.mark.if_subject_takes("devices")
@pytest.mark.parametrize("kind", MODELS)
def test_it_has_none_on_several_devices_of_one_process_too(subject, kind):
    batch, model = samples(8), model_of(kind)
    alone = copy.deepcopy(model)
    pipeline = subject(model, MSE, n_microbatches=4, split=[1, 2, 3], devices=["cpu"] * 4)
    pipeline.step(*batch)
    for x, y in zip(*(part.split(2) for part in batch), strict=True):
        (MSE(alone(x), y) / 4).backward()
    require_same_gradients(pipeline.module, alone)


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)

    def forward(self, x):
        return self.words(x)


class Logits(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.layer = weight, nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) @ self.weight.t()


@pytest.mark.world_size(2)
def test_a_sparse_gradient_of_a_tied_weight_is_added(subject):
    """Regression test: its rank raised, and the other rank waited for it."""
    torch.manual_seed(0)
    words = Vector()
    model = nn.Sequential(words, Logits(words.words.weight))
    alone = copy.deepcopy(model)
    pipeline = subject(model, nn.CrossEntropyLoss(), n_microbatches=2, split=[1])
    x, y = torch.tensor([0, 1, 1, 3]), torch.tensor([1, 2, 3, 4])
    for _ in range(2):
        pipeline.step(x, y)
        nn.CrossEntropyLoss()(alone(x), y).backward()
    for name, p in pipeline.module.named_parameters():
        torch.testing.assert_close(p.grad.to_dense(), alone.get_parameter(name).grad.to_dense(), msg=name)


@pytest.mark.world_size(4)
def test_in_pipelines_side_by_side_it_has_none_where_no_pipeline_has_one(subject, rank):
    """A pipeline with a gradient shares it with the others, divided by all, as with DistributedDataParallel."""

    class Reads(nn.Linear):
        def forward(self, pair):
            return super().forward(pair[rank // 2])

    torch.manual_seed(0)
    model = nn.Sequential(Pair(), Reads(3, 3))
    model[0].third = nn.Linear(1, 1)
    pipeline = subject(model, MSE, n_microbatches=2, **side_by_side(rank))
    x, y = samples(4)
    pipeline.step(x, y)
    if rank % 2 == 0:
        assert model[0].third.weight.grad is None
        alone = copy.deepcopy(model)
        alone.zero_grad()
        for part in (0, 1):
            (MSE(nn.functional.linear(alone[0](x)[part], alone[1].weight, alone[1].bias), y) / 2).backward()
        require_same_gradients(nn.ModuleDict({"0": model[0]}), nn.ModuleDict({"0": alone[0]}))


@pytest.mark.world_size(3)
def test_what_gets_no_gradient_does_not_decay_in_pipedream(subject, rank):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Cut(3, 3))
    before = copy.deepcopy(model)
    pipeline = subject(
        model,
        MSE,
        schedule="pipedream",
        n_microbatches=6,
        split=[1, 2],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5),
    )
    pipeline.step(*samples(6))
    assert torch.equal(pipeline.module.get_parameter(f"{rank}.weight"), before[rank].weight) == (rank < 2)


@pytest.mark.world_size(2)
def test_flags_travel_only_where_an_input_may_stay_unused(subject, world_size):
    def bytes_back(model):
        pipeline = subject(model, MSE, n_microbatches=2, split=[1])
        pipeline.step(*samples(4))
        (forms,) = pipeline._known.values()
        return [form[0].gradients().tensors for form in forms.values()]

    assert bytes_back(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == [(((2, 3), torch.float32),)]
    assert bytes_back(nn.Sequential(nn.Linear(3, 3), Cut(3, 3))) == [(((2, 3), torch.float32), ((1,), torch.uint8))]
