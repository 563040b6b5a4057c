"""The values between stages of a pipeline and its inputs and outputs: tuples, strides, views, graphs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from pdlcheck.checks import check_pipeline

from .models import MSE, samples, starter, tanh_net

pytestmark = pytest.mark.verifies("Pipeline")


class Branches(nn.Module):
    """A layer that makes three tensors of one; the third holds integers, which later stages only pass on."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x):
        return self.one(x), self.two(x).tanh(), (x[:, 0] > 0).long()


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, parts):
        wide, narrow, kind = parts
        return self.layer(wide), narrow, kind


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Embedding(2, 2)

    def forward(self, parts):
        wide, narrow, kind = parts
        return (wide + narrow) * self.scale(kind)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_several_tensors_and_integers_go_from_stage_to_stage(subject, world, recompute):
    start = starter(subject, MSE, n_microbatches=3, split="layers", recompute=recompute)
    x, y = samples(7)
    check_pipeline(
        start,
        lambda: nn.Sequential(Branches(), Middle(), Join()),
        MSE,
        [(x, y[:, :2])] * 2,
        world,
        world_size=3,
        n_microbatches=3,
    )


class Pair(NamedTuple):
    rows: torch.Tensor
    sums: torch.Tensor


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        rows = self.layer(x)
        return Pair(rows, rows.sum(1))


def paired_loss(out, targets):
    return MSE(out.rows, targets.rows) + MSE(out.sums, targets.sums)


def test_outputs_and_targets_may_be_named_tuples(subject, world):
    x, y = samples(5)
    targets = Pair(y, y.sum(1))

    def step():
        torch.manual_seed(0)
        pipeline = subject(nn.Sequential(nn.Linear(3, 3), Paired()), paired_loss, n_microbatches=2)
        return pipeline.step(x, targets)

    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 3), Paired())(x)
    _, result = world.run(step, world_size=2)
    assert torch.allclose(result.outputs.rows, expected.rows)
    assert torch.allclose(result.outputs.sums, expected.sums)
    # micro-batches of three and two samples
    assert torch.allclose(result.loss, paired_loss(expected, targets))


class Unpaired(nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0] + pair[1][:, None])


@pytest.mark.if_subject_takes("devices")
def test_what_layers_hand_on_may_be_named_tuples_where_they_are_timed(subject):
    x, y = samples(4)
    layers = nn.Sequential(Paired(), Unpaired(3, 3))
    expected = layers(x)
    split = {"split": "time", "sample": x}
    result = subject(layers, MSE, devices=["cpu"] * 2, n_microbatches=2, **split).step(x, y)
    assert torch.allclose(result.outputs, expected)


class Turned(nn.Module):
    """A layer that returns a view with other strides, whose gradient also has other strides."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).t().contiguous().t()


def test_activations_may_have_any_strides(subject, world):
    start = starter(subject, MSE, n_microbatches=2, split="layers")
    make = lambda: nn.Sequential(Turned(), Turned())  # noqa: E731
    check_pipeline(start, make, MSE, [samples(6)], world, world_size=2, n_microbatches=2)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 3)

    def forward(self, given):
        x, words = given
        return self.words(words) + x


class Conjugated(nn.Linear):
    """A layer with complex values and lazy conjugation, which torch marks by a bit, forwards and backwards."""

    def __init__(self, negated):
        super().__init__(3, 3, dtype=torch.complex64)
        self.negated = negated

    def forward(self, x):
        if x.is_floating_point():
            x = torch.complex(x, x)
        out = super().forward(x.conj()).conj()
        return (out.imag, out.real) if self.negated else out


class Summed(nn.Linear):
    def forward(self, x):
        return super().forward(x[0] + x[1] if isinstance(x, tuple) else x.real + x.imag)


@pytest.mark.parametrize("negated", [False, True], ids=["conjugated", "negated"])
def test_activations_may_be_conjugated(subject, world, negated):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(Conjugated(False), Conjugated(negated), Summed(3, 3))

    def train():
        pipeline = subject(model(), MSE, schedule="gpipe", n_microbatches=4, split="layers")
        for _ in range(3):
            pipeline.step(*samples(8))
        return [p.grad for p in pipeline.module.parameters()]

    whole, (x, y) = model(), samples(8)
    for _ in range(3):
        MSE(whole(x), y).backward()
    found = [grad for rank in world.run(train, world_size=3) for grad in rank]
    for parameter, grad in zip(whole.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_inputs_may_be_several_and_integers(subject, world):
    x, y = samples(6)
    batch = ((x, torch.tensor([0, 4, 2, 2, 1, 0])), y)
    start = starter(subject, MSE, n_microbatches=4)
    make = lambda: nn.Sequential(TwoInputs(), nn.Tanh(), nn.Linear(3, 3))  # noqa: E731
    check_pipeline(start, make, MSE, [batch], world, world_size=2, n_microbatches=4)


@pytest.mark.if_subject_takes("recompute")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_go_on_into_what_made_inputs_and_targets(subject, world, recompute):
    x, y = samples(5)

    def make():
        torch.manual_seed(0)
        return tanh_net(2), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def train():
        model, before, after = make()
        pipeline = subject(model, MSE, n_microbatches=2, recompute=recompute)
        for _ in range(2):
            pipeline.step((x * before).exp(), (y * after).exp())
        return before.grad, after.grad

    model, before, after = make()
    MSE(model((x * before).exp()), (y * after).exp()).backward()
    (first, nothing), (none, last) = world.run(train, world_size=2)
    assert nothing is None
    assert none is None
    assert torch.allclose(first, 2 * before.grad)
    assert torch.allclose(last, 2 * after.grad)


class Unused(nn.Module):
    """A layer that does not use its input: the stage before gets a gradient of zeros."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.weight.expand(len(x), 3) * 2


def test_a_stage_that_does_not_use_its_input_sends_zeros_back(subject, world):
    start = starter(subject, MSE, n_microbatches=2, split="layers")
    check_pipeline(
        start,
        lambda: nn.Sequential(nn.Linear(3, 3), Unused()),
        MSE,
        [samples(4)],
        world,
        world_size=2,
        n_microbatches=2,
    )


def test_a_stage_may_begin_in_place_and_be_frozen(subject, world):
    def make():
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        return model

    start = starter(subject, MSE, n_microbatches=2, split=[1, 3])
    check_pipeline(start, make, MSE, [samples(5)] * 2, world, world_size=3, n_microbatches=2)


class Doubled(nn.Module):
    """A layer that writes into its input, without an attribute that declares it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x.mul_(2) * self.weight


@pytest.mark.if_subject_takes("recompute")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("infer_first", [False, True], ids=["step", "infer"])
def test_a_stage_may_write_its_input(subject, world, recompute, infer_first):
    x, y = samples(4)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(Doubled(), nn.Linear(3, 3), Doubled(), nn.Linear(3, 3))

    def gradients():
        pipeline = subject(make(), MSE, n_microbatches=2, split=[2], recompute=recompute)
        if infer_first:
            with torch.inference_mode():
                pipeline.infer(x.clone())
        pipeline.step(x.clone(), y)
        return {name: parameter.grad for name, parameter in pipeline.module.named_parameters()}

    model = make()
    MSE(model(x.clone()), y).backward()
    first, second = world.run(gradients, world_size=2)
    found = first | second
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad), name


class Narrow(nn.Linear):
    """A layer that computes in bfloat16, with gradients in float32."""

    def __init__(self):
        super().__init__(3, 3, bias=False, dtype=torch.bfloat16)
        self.weight.grad_dtype = torch.float32

    def forward(self, x):
        return super().forward(x.bfloat16())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_of_another_dtype_than_their_parameters_are_added_in_that(subject, rank, schedule):
    torch.manual_seed(0)
    model, wide = nn.Sequential(Narrow(), nn.Tanh(), Narrow()), torch.full((4, 3), 1 / 3)
    options = {"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.1)} if schedule == "pipedream" else {}
    if not options:
        model[2].weight = model[0].weight
    before = model[2 * rank].weight.detach().clone()
    loss = lambda y, t: nn.functional.mse_loss(y.float(), t)  # noqa: E731
    pipeline = subject(model, loss, n_microbatches=2, schedule=schedule, **options)
    pipeline.step(wide, -wide)
    (weight,) = pipeline.module.parameters()
    if options:
        assert not torch.equal(weight, before)
        return
    whole = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    whole[2].weight = whole[0].weight
    whole[0].weight.data.copy_(before)
    nn.functional.mse_loss(whole(wide), -wide).backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, whole[0].weight.grad, rtol=0.05, atol=0.01)
