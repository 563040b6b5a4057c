"""The check of a pipeline rejects broken ones, and accepts torch's."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_pipeline, check_schedule
from pdlcheck.checks.pipeline.places import diagnose_outputs
from pdlcheck.errors import Inconclusive
from pdlcheck.worlds import get_world

from ..pipelines_by_hand import EVEN, MSE, UNEVEN, ByHand, M, batches, net, starter


def tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    return model


def check(start, make=net, data=EVEN, **keywords):
    check_pipeline(start, make, MSE, data, get_world("sim"), world_size=2, n_microbatches=M, **keywords)


@pytest.mark.parametrize("data", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("make", [net, tied])
def test_check_pipeline_accepts(world, make, data):
    check_pipeline(starter(), make, MSE, data, world, world_size=2, n_microbatches=M)


@pytest.mark.parametrize(
    ("spoilt", "data", "message"),
    [
        (
            {"scale": lambda own, total: 1.0, "loss_scale": 1 / M},
            EVEN,
            r"pipeline: in step 0 rank 0 holds \S+ at \(0, 0\) of the gradient of '0.weight', one process on the whole "
            r"batch holds \S+\n  wrong gradients  2 of 2 on rank 0: '0.weight', '0.bias'; 2 of 2 on rank 1: "
            r"'2.weight', '2.bias'\n"
            r"  best fit         3 times the gradient of one process, cosine 1.000000\n"
            r"  likely cause     it is 3 times too large: not divided by n_microbatches\n"
            r"  case             world=sim world_size=2 n_microbatches=3 samples=\[6, 9\] seed=0",
        ),
        (
            {"scale": lambda own, total: own / total / M, "loss_scale": M},
            EVEN,
            "it is 3 times too small: divided by n_microbatches once too often",
        ),
        (
            {"scale": lambda own, total: own / total / 7, "loss_scale": 7},
            UNEVEN,
            "7 times too small: divided by the samp",
        ),
        (
            {"scale": lambda own, total: own, "loss_scale": 1 / 7},
            UNEVEN,
            "7 times too large: not divided by the samples",
        ),
        (
            {"scale": lambda own, total: 5 * own / total, "loss_scale": 1 / 5},
            EVEN,
            r"best fit         5 times the gradient of one process, cosine 1.000000",
        ),
        (
            {"scale": lambda own, total: 1 / M},
            UNEVEN,
            r"returns the loss \S+, one process has \S+\n  best fit .*\n  likely cause  it is the plain mean over",
        ),
        (
            {"scale": lambda own, total: 1.0},
            EVEN,
            r"best fit      3 times the loss[\s\S]*cause  not divided by n_micro",
        ),
        (
            {"last_loss": True},
            UNEVEN,
            r"returns the loss .*\n  best fit .*\n  likely cause  it is that of micro-batch 2 of 3 alo",
        ),
        (
            {"last_dropped": True},
            EVEN,
            r"returns outputs of shape \(4, 2\), those of one process have \(6, 2\)\n.*missing",
        ),
        (
            {"order": [2, 0, 1]},
            EVEN,
            r"rank 1 returns with \S+ at \(0, 0\) of the outputs[\s\S]*in the order \[2, 0, 1\]",
        ),
        ({"sent_back": 0}, EVEN, r"rank 0 holds 0 at [\s\S]*it is zero: no gradient came back"),
        ({"same_slice": True}, EVEN, r"in the order \[0, 0, 0\]|of the outputs"),
        ({"stale": True}, batches(6, 6), r"in step 1 rank 1 returns with \S+ at \(0, 0\) of the outputs, right is"),
    ],
    ids=[
        *("not divided", "divided twice", "divided by samples", "multiplied", "five times", "plain mean", "loss"),
        "last loss",
        *("last dropped", "order", "no gradient", "same slice", "stale"),
    ],
)
def test_check_pipeline_rejects(spoilt, data, message):
    with pytest.raises(AssertionError, match=message):
        check(starter(**spoilt), data=data)


@pytest.mark.parametrize(
    ("spoilt", "data", "message"),
    [
        (
            {"scale": lambda own, total: 1 / M},
            UNEVEN,
            "it is the plain mean over micro-batches: weight them with their",
        ),
        ({"scale": lambda own, total: 1.0}, UNEVEN, "it is the sum over micro-batches of means"),
        ({"last_dropped": True}, EVEN, "micro-batch 2 of 3 is missing"),
        ({"last_dropped": True, "scale": lambda own, total: 1 / (M - 1)}, EVEN, "micro-batch 2 of 3 is left out"),
        ({"same_slice": True, "scale": lambda own, total: 1 / M}, EVEN, "every micro-batch is micro-batch 0"),
    ],
    ids=["plain mean", "sum of means", "missing", "left out", "same slice"],
)
def test_gradients_alone_tell_what_went_wrong(spoilt, data, message):
    with pytest.raises(AssertionError, match=message):
        check(starter(**spoilt), data=data, results=False)


BACK = r"goes wrong       on the way back, after layer '2': its gradients and those of later layers are right\n"
ALONE = r"goes wrong       in layer '2' alone: the gradient of '0.\w+', which comes back through there, is right\n"
ELSEWHERE = "on its rank or on the way to it, as other gradients are right"


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (
            {"sent_back": 3},
            rf"{BACK}.* 3 times too large: added so often, or multiplied by n_microbatches, {ELSEWHERE}",
        ),
        ({"sent_back": 1 / 3}, rf"{BACK}.* 3 times too small: divided by n_microbatches {ELSEWHERE}"),
        ({"sent_back": -1}, rf"{BACK}  likely cause     no known cause fits; "),
        ({"sent_back": 0}, rf"{BACK}  likely cause     it is zero: no gradient came back"),
        ({"kept": 3}, rf"{ALONE}.* 3 times too large: added so often, or multiplied by n_microbatches, {ELSEWHERE}"),
        (
            {"zeroed": True},
            rf"{ALONE}.*micro-batch 0 counts 0 times, micro-batch 1 counts 0 times, where each counts on",
        ),
        (
            {"sent_back": 0, "kept": 5},
            r"'2.bias'\n  likely cause     on rank 0 it is zero: .*; what is wrong on other ranks is something else",
        ),
    ],
    ids=["large", "small", "negative", "zero", "kept", "zeroed", "two faults"],
)
def test_what_is_wrong_in_one_place_alone_is_not_said_of_the_loss(spoilt, message):
    with pytest.raises(AssertionError, match=message):
        check(starter(**spoilt))


@pytest.mark.parametrize(("counts", "message"), [((1, 0, 2), "1 counts 0 times, micro-batch 2 counts 2 times, wh")])
def test_micro_batches_of_a_loss_that_is_no_mean_over_samples_are_counted(counts, message):
    """The loss divides by the number of positive targets."""

    def loss(outputs, targets, total=None):
        counted = (targets > 0).double()
        return ((outputs - targets) ** 2 * counted).sum() / (counted.sum() if total is None else total)

    def start(counts):
        def pipeline(model):
            def step(x, y):
                for count, own, goal in zip(counts, x.tensor_split(M), y.tensor_split(M), strict=True):
                    (count * loss(model(own), goal, (y > 0).sum())).backward()

            return model, step

        return pipeline

    def checked(counts):
        check_pipeline(start(counts), net, loss, EVEN, get_world("sim"), world_size=1, n_microbatches=M, results=False)

    checked((1, 1, 1))
    with pytest.raises(AssertionError, match=message):
        checked(counts)


def with_layer(layer):
    return lambda: nn.Sequential(nn.Linear(2, 3), layer(), nn.Linear(3, 2))


@pytest.mark.parametrize("results", [True, False])
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout, "in step 0 one process gets other outputs each time: the model draws random numbers, as dropout"),
        (
            lambda: nn.BatchNorm1d(3),
            "in step 0 one process gets other outputs from micro-batches: the model mixes sampl",
        ),
    ],
    ids=["dropout", "batch norm"],
)
def test_check_pipeline_does_not_decide_on_a_model_that_differs_from_itself(layer, message, results):
    with pytest.raises(Inconclusive, match=message):
        check(starter(), make=with_layer(layer), results=results)
    check(starter(), make=lambda: with_layer(layer)().eval(), results=results)


SWAPPED = {
    "activations": ({"swapped": "activations"}, "activations of micro-batches 0 and 1 changed places between layers"),
    "by slot": ({"swapped": "activations", "by_slot": True}, "activations of micro-batches 0 and 1 changed places bet"),
    "gradients": ({"swapped": "gradients"}, "gradients of micro-batches 0 and 1 changed places between layers '2' and"),
}


@pytest.mark.parametrize("kind", SWAPPED)
def test_micro_batches_that_change_places_between_stages_are_named(kind):
    spoilt, cause = SWAPPED[kind]
    with pytest.raises(AssertionError, match=rf"likely cause     (2 causes fit: \(1\) )?{cause}"):
        check(starter(**spoilt), results=False)


def test_swapped_activations_show_in_the_outputs_too():
    with pytest.raises(
        AssertionError,
        match=r"wrong outputs  2 of 3 micro-batches: 0, 1\n  likely cause   micro-batches are in the order \[1, 0, 2\]",
    ):
        check(starter(swapped="activations"))


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        ([2, 3, 0, 1, 4, 5], "micro-batches are in the order [1, 0, 2]"),
        ([0, 1, 0, 1, 0, 1], "every micro-batch has the outputs of micro-batch 0: one input was sent again"),
        ([0, 1, 2, 3, 2, 3], "the outputs are those of micro-batches [0, 1, 1]: some were sent or returned more than"),
        ([0, 2, 4, 1, 3, 5], "the outputs are right and stand at other samples, in the order [0, 2, 4, 1, 3, 5]"),
        ([0, 1, 2, 3, 4, 4], None),
    ],
)
def test_right_outputs_in_other_places_are_recognised(rows, cause):
    goal = torch.arange(18.0).reshape(6, 3)
    found = diagnose_outputs(goal[rows], goal, 3).cause
    assert found == cause or found.startswith(cause)


def test_tied_copies_that_are_not_added_are_seen():
    with pytest.raises(
        AssertionError,
        match=r"in layers '0', '2' alone: the gradient of '0.bias', which comes back through there, is right\n"
        "  likely cause     it is the copy's own part: gradients of the tied copies were not added",
    ):
        check(starter(not_summed=True), make=tied)


def test_tied_copies_that_differ_in_the_last_bits_are_seen():
    with pytest.raises(
        AssertionError, match=r"rank 1 holds \S+ at .* of gradient of '2.weight', rank 0 holds in its copy"
    ):
        check(starter(rounded=True), make=tied)


def test_gradients_that_were_not_zeroed_are_seen():
    class Adding(ByHand):
        def step(self, x, y):
            before = getattr(self, "before", {})
            result = super().step(x, y)
            self.before = {name: p.grad.clone() for name, p in self.module.named_parameters()}
            for name, grad in before.items():
                dict(self.module.named_parameters())[name].grad += grad
            return result

    with pytest.raises(AssertionError, match=r"in step 1 [\s\S]*the gradient of the step before was added"):
        check(starter(Adding))


def test_a_parameter_that_no_rank_holds_is_seen():
    class Shorter(ByHand):
        def __init__(self, model):
            super().__init__(model)
            if self.rank:
                self.module = nn.Sequential(OrderedDict([("2", nn.Linear(3, 2, bias=False).double())]))

    with pytest.raises(AssertionError, match=r"in step 0 no rank holds '2.bias'"):
        check(starter(Shorter))


def test_a_pipeline_that_returns_nothing_is_seen():
    class Silent(ByHand):
        def step(self, x, y):
            super().step(x, y)

    with pytest.raises(AssertionError, match="no rank returned a loss; results=False accepts that"):
        check(starter(Silent))
    check(starter(Silent), results=False)


class Named(nn.Module):
    """A model that takes and returns dicts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, batch):
        return {"logits": self.layer(batch["x"]), "first": batch["x"][:, :1], "name": "a text"}


def of_logits(outputs, targets):
    return MSE(outputs["logits"], targets)


def told_by_rank_0(*, change=lambda loss, outputs: (loss, outputs)):
    """Return a pipeline that runs on rank 0 only; its step returns ``change(loss, outputs)``."""

    def start(model):
        def step(x, y):
            outputs = model(x)
            loss = of_logits(outputs, y)
            loss.backward()
            return change(loss.detach(), outputs)

        return (model, step) if dist.get_rank() == 0 else (nn.Module(), lambda x, y: None)

    return start


def check_named(**keywords):
    data = [({"x": x}, y) for x, y in UNEVEN]
    check_pipeline(told_by_rank_0(**keywords), Named, of_logits, data, get_world("sim"), world_size=2, n_microbatches=M)


def test_batches_and_outputs_may_be_dicts_and_losses_numbers():
    check_named()
    check_named(change=lambda loss, outputs: (loss.item(), outputs))
    check_named(change=lambda loss, outputs: (loss.float(), outputs))
    with pytest.raises(AssertionError, match=r"returns with \S+ at \(0, 0\) of the outputs"):
        check_named(change=lambda loss, outputs: (loss, outputs | {"first": outputs["first"] + 1}))
    with pytest.raises(AssertionError, match=r"returns the loss \S+, one process has \S+\n  best fit +1.00001 times"):
        check_named(change=lambda loss, outputs: (1.00001 * loss.float(), outputs))
    with pytest.raises(TypeError, match=r"step of start must return \(loss, outputs\), or None, got Tensor"):
        check_named(change=lambda loss, outputs: loss)


def test_a_loss_of_zero_is_compared():
    def zero(outputs, targets):
        return outputs.sum() - outputs.sum().detach()

    def start(model):
        def step(x, y):
            outputs = model(x)
            zero(outputs, y).backward()
            return 1.0, outputs

        return model, step

    with pytest.raises(
        AssertionError, match="returns the loss 1, one process has 0\n  likely cause  no known cause fits; "
    ):
        check_pipeline(start, net, zero, EVEN, get_world("sim"), world_size=1, n_microbatches=M)


def test_batches_that_cannot_be_cut_are_refused():
    for data, message in (([], "needs a batch or more, got none"), ([(1.0, 2.0)], "got float 1.0")):
        with pytest.raises(ValueError, match=message):
            check(starter(), data=data)


def test_check_pipeline_does_not_decide_without_a_gradient():
    def constant():
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).requires_grad_(False)

    with pytest.raises(Inconclusive, match="the gradient of step 0 is zero"):
        check_pipeline(
            lambda model: (model, lambda x, y: None),
            constant,
            lambda out, y: (out * torch.ones(1, requires_grad=True)).sum(),
            EVEN,
            get_world("sim"),
            world_size=1,
            n_microbatches=M,
        )


# torch's own


@pytest.mark.parametrize("kind", ["ScheduleGPipe", "Schedule1F1B"])
def test_torchs_pipelines_pass_with_even_micro_batches(world, kind):
    """The micro-batches of torch's pipelines have one shape and count alike."""

    def start(model):
        warnings.simplefilter("ignore")
        from torch.distributed import pipelining

        rank = dist.get_rank()
        made = ByHand(model)
        stage = pipelining.PipelineStage(made.module, rank, 2, torch.device("cpu"))
        schedule = getattr(pipelining, kind)(stage, M, loss_fn=MSE)

        def step(x, y):
            if rank == 0:
                schedule.step(x)
                return None
            losses = []
            out = schedule.step(target=y, losses=losses)
            return torch.stack(losses).mean().detach(), out.detach()

        return made.module, step

    check_pipeline(start, net, MSE, batches(6, 6, 6), world, world_size=2, n_microbatches=M)


LOOP, V = ((0, 2), (1, 3)), ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("kind", "homes"),
    [
        ("ScheduleInterleaved1F1B", LOOP),
        ("ScheduleLoopedBFS", LOOP),
        ("ScheduleInterleavedZeroBubble", LOOP),
        ("ScheduleZBVZeroBubble", V),
        ("ScheduleDualPipeV", V),
    ],
)
@pytest.mark.parametrize("rows", ["pipeline_order", "pipeline_order_with_comms"])
def test_torchs_schedules_pass(kind, homes, rows):
    def orders():
        warnings.simplefilter("ignore")
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        stages = [
            pipelining.PipelineStage(nn.Linear(1, 1), stage, 4, torch.device("cpu")) for stage in homes[dist.get_rank()]
        ]
        made = getattr(schedules, kind)(stages, 4, loss_fn=MSE)
        orders = getattr(made, rows)
        return {rank: [None if cell is None else str(cell) for cell in row] for rank, row in orders.items()}

    grid = get_world("sim").run(orders, world_size=2)[0]
    check_schedule(grid, name=kind, in_steps=False)
    late = {rank: [cell for cell in row if cell != "0F0"] for rank, row in grid.items()}
    with pytest.raises(AssertionError, match=f"{kind}: 0F0 on rank 0"):
        check_schedule(late, name=kind, in_steps=False)
