"""The checks of pipelines reject what is broken, say why, and accept the correct twin; torch's schedules pass them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_pipedream, check_pipeline, check_same_gradients, check_schedule
from pdlcheck.errors import Inconclusive
from pdlcheck.worlds import get_world

MSE = nn.MSELoss()
SGD = partial(torch.optim.SGD, lr=0.1)
M = 3


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    return model


def batches(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(size, 2, generator=generator) for _ in range(2)) for size in sizes]


EVEN, UNEVEN = batches(6, 9), batches(7, 5)


class ByHand:
    """GPipe on two ranks in plain sends and receives; each part can be spoilt."""

    def __init__(self, model, **spoilt):
        self.rank = dist.get_rank()
        names = ["0", "1"] if self.rank == 0 else ["2"]
        self.module = nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in names))
        self.spoilt = spoilt
        self.kept = None

    def part(self, tensor, i):
        return tensor.tensor_split(M)[0 if self.spoilt.get("same_slice") else i]

    def count(self):
        return M - 1 if self.spoilt.get("last_dropped") else M

    def step(self, x, y):
        return self.first(x) if self.rank == 0 else self.second(x, y)

    def first(self, x):
        outs = []
        for i in range(self.count()):
            out = self.module(self.part(x, i))
            if self.spoilt.get("stale") and self.kept is not None and self.kept[i].shape == out.shape:
                dist.send(self.kept[i], 1)
            else:
                dist.send(out.detach(), 1)
            outs.append(out)
        self.kept = [out.detach() for out in outs]
        for out in outs:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        self.tie()

    def second(self, x, y):
        inputs, outs, losses = [], [], []
        for i in range(self.count()):
            targets = self.part(y, i)
            received = torch.empty(len(targets), self.module[0].in_features, dtype=x.dtype)
            dist.recv(received, 0)
            inputs.append(received.requires_grad_())
            outs.append(self.module(received))
            losses.append(MSE(outs[-1], targets) * self.share(len(targets), len(y)))
        for received, loss in zip(inputs, losses, strict=True):
            loss.backward()
            grad = received.grad if not self.spoilt.get("no_grad_back") else torch.zeros_like(received)
            dist.send(grad, 0)
        self.tie()
        order = self.spoilt.get("order", range(self.count()))
        loss = torch.stack(losses).sum() * self.spoilt.get("loss_scale", 1)
        return loss.detach(), torch.cat([outs[i] for i in order]).detach()

    def share(self, own, total):
        return self.spoilt.get("scale", lambda own, total: own / total)(own, total)

    def tie(self):
        weights = [p for name, p in self.module.named_parameters() if name in ("0.weight", "2.weight")]
        if weights[0].shape == (2, 2) and not self.spoilt.get("not_summed"):
            dist.all_reduce(weights[0].grad)
            if self.spoilt.get("rounded") and self.rank:
                weights[0].grad *= 1 + 1e-13


def starter(kind=ByHand, **spoilt):
    def pipeline(model):
        made = kind(model, **spoilt)
        return made.module, made.step

    return pipeline


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
            r"batch holds \S+\n  wrong gradients  2 of 2 on rank 0\n"
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
        ({"scale": lambda own, total: 1 / M}, UNEVEN, r"returns the loss \S+, one process has \S+\n  best fit"),
        (
            {"scale": lambda own, total: 1.0},
            EVEN,
            r"best fit      3 times the loss[\s\S]*cause  not divided by n_micro",
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
        ({"no_grad_back": True}, EVEN, r"rank 0 holds 0 at [\s\S]*it is zero: no gradient came back"),
        ({"same_slice": True}, EVEN, r"in the order \[0, 0, 0\]|of the outputs"),
        ({"stale": True}, batches(6, 6), r"in step 1 rank 1 returns with \S+ at \(0, 0\) of the outputs, right is"),
    ],
    ids=[
        *("not divided", "divided twice", "divided by samples", "multiplied", "plain mean", "loss", "last dropped"),
        *("order", "no gradient", "same slice", "stale"),
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


def test_tied_copies_that_are_not_added_are_seen():
    with pytest.raises(AssertionError, match="it is the copy's own part: gradients of the tied copies were not added"):
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
    """Those of torch have one shape and count alike."""

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


@pytest.mark.parametrize("kind", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"])
def test_torchs_schedules_pass(kind):
    def orders():
        warnings.simplefilter("ignore")
        from torch.distributed import pipelining

        rank = dist.get_rank()
        stages = [pipelining.PipelineStage(nn.Linear(1, 1), rank + 2 * i, 4, torch.device("cpu")) for i in range(2)]
        made = getattr(pipelining, kind)(stages, 4, loss_fn=MSE)
        return {
            rank: [None if cell is None else str(cell) for cell in row] for rank, row in made.pipeline_order.items()
        }

    grid = get_world("sim").run(orders, world_size=2)[0]
    check_schedule(grid, name=kind, in_steps=False)
    late = {rank: [cell for cell in row if cell != "0F3"] for rank, row in grid.items()}
    with pytest.raises(AssertionError, match=f"{kind}: nobody does 0F3"):
        check_schedule(late, name=kind, in_steps=False)


# schedules


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([["0F0", None], [None, "1F0", "1B0"]], "0B0 is not done once, whole or in halves"),
        ([["0F0", "0F0", None, "0B0"], [None, "1F0", "1B0"]], r"0F0 is done twice[\s\S]*>0F0<  >0F0<"),
        (
            [["0F0", None, None, "0B0"], ["1F0", None, "1B0"]],
            r"rank 1 does 1F0 in step 0, which reads 0F0, which is made",
        ),
        ([["0F0", "0B0"], [None, "1F0", "1B0"]], r"rank 0 does 0B0 in step 1, which reads 1B0, which nobody has made"),
        ([["0B0", "0F0"]], r"rank 0 does 0B0 in step 0, which reads 0F0, which nobody has made before"),
        ([["0F0"], ["0B0"]], r"stage 0 is on ranks 0 and 1[\s\S]*>0F0<[\s\S]*>0B0<"),
        ([["0F0", None, None, "0B0"], [None, "1F0", "1I0"]], "1B0 is not done once, whole or in halves"),
        ([["0F0", "F1"]], "rank 0 has 'F1' in step 1; a cell is such as 1F3 or 1SEND_F3"),
    ],
    ids=["missing", "twice", "same step", "early", "backward first", "two ranks", "half", "no cell"],
)
def test_check_schedule_rejects(grid, message):
    with pytest.raises(AssertionError, match=message):
        check_schedule(grid)


def test_check_schedule_rejects_activations_over_the_limit():
    grid = [["0F0", "0F1", "0B0", "0B1"]]
    check_schedule(grid, max_live=2)
    with pytest.raises(AssertionError, match="rank 0 holds 2 activations from step 1 on, the limit is 1"):
        check_schedule(grid, max_live=1)


def test_check_schedule_does_not_decide_on_nothing():
    with pytest.raises(Inconclusive, match="schedule: the schedule is empty"):
        check_schedule([[None], []])


def test_check_schedule_rejects_orders_that_wait_for_one_another():
    with pytest.raises(AssertionError, match=r"rank 0 in 0B0 waits for 1B0; rank 1 in 1F1 waits for 0F1"):
        check_schedule([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], in_steps=False)


def test_check_schedule_rejects_messages_that_meet_head_to_head():
    """1F1B with blocking sends: each of two neighbours sends, and neither receives."""
    first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"]
    second = ["1RECV_F0", "1F0", "1B0", "1RECV_F1", "1SEND_B0", "1F1", "1B1", "1SEND_B1"]
    check_schedule([first, second])
    crossed = ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"]
    with pytest.raises(
        AssertionError, match=r"rank 0 in 0SEND_F1 waits for 1RECV_F1; rank 1 in 1SEND_B0 waits for 0RECV_B0"
    ):
        check_schedule([first, crossed])
    forgotten = [cell for cell in second if cell != "1RECV_F0"]
    with pytest.raises(AssertionError, match=r"rank 0 in 0SEND_F0 waits for 1RECV_F0; rank 1 in 1F0 waits for 0F0"):
        check_schedule([first, forgotten])


# recomputation


def random_net():
    return nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Recomputing:
    """One stage on one rank, run again before its backward pass."""

    def __init__(self, model, *, preserve_rng_state=True, twice=False):
        self.module = model
        self.preserve, self.twice = preserve_rng_state, twice

    def step(self, x, y):
        for part, goal in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            if self.twice:
                with torch.random.fork_rng(), torch.no_grad():
                    self.module(part)
            out = torch.utils.checkpoint.checkpoint(
                self.module[:2], part, use_reentrant=False, preserve_rng_state=self.preserve
            )
            MSE(self.module[2:](out), goal).backward()


class Plain(Recomputing):
    def step(self, x, y):
        for part, goal in zip(x.tensor_split(M), y.tensor_split(M), strict=True):
            MSE(self.module(part), goal).backward()


def same(start, make=random_net, other=None):
    check_same_gradients(start, other or starter(Plain), make, EVEN, get_world("sim"), world_size=2)


def test_check_same_gradients_accepts_torchs_checkpoint():
    same(starter(Recomputing))


def test_check_same_gradients_rejects_fresh_dropout_masks():
    with pytest.raises(AssertionError, match=r"pipeline: rank 0 holds \S+ at .* of gradient of '0.weight' in step 0"):
        same(starter(Recomputing, preserve_rng_state=False))


def test_check_same_gradients_rejects_a_second_update_of_running_statistics():
    with pytest.raises(
        AssertionError, match=r"of buffer '2.running_mean'[\s\S]*the second forward pass changed buffers"
    ):
        same(starter(Recomputing, twice=True))


def test_check_same_gradients_does_not_decide_without_random_numbers():
    with pytest.raises(Inconclusive, match="gradients do not depend on random numbers"):
        same(starter(Recomputing), make=net)


# PipeDream


class DreamByHand(ByHand):
    """1F1B of two stages, each step at once; what a stage keeps of its weights can be spoilt."""

    def __init__(self, model, **spoilt):
        super().__init__(model, **spoilt)
        self.optimizer = SGD(self.module.parameters())

    def passes(self, x, i, used):
        weights = self.stashed(used)
        return weights, torch.func.functional_call(self.module, weights, (x,))

    def stashed(self, used):
        return {name: p.detach().clone().requires_grad_() for name, p in used.items()}

    def update(self, weights):
        for name, parameter in self.module.named_parameters():
            parameter.grad = weights[name].grad
        self.optimizer.step()

    def first(self, x):
        """F0 F1 B0 F2 B1 ...: two versions of the weights at a time."""
        parts = list(x.tensor_split(self.spoilt["count"]))
        live = {}

        def forward(i):
            weights = self.stashed(dict(self.module.named_parameters()))
            live[i] = weights, torch.func.functional_call(self.module, weights, (parts[i],))
            return live[i][1].detach()

        dist.send(forward(0), 1)
        for i in range(len(parts)):
            if i + 1 < len(parts):
                sends = dist.isend(forward(i + 1), 1)
            weights, out = live.pop(i)
            if self.spoilt.get("not_stashed"):
                weights = self.stashed(dict(self.module.named_parameters()))
                out = torch.func.functional_call(self.module, weights, (parts[i],))
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
            if i + 1 < len(parts):
                sends.wait()
            self.update(weights)

    def second(self, x, y):
        start = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        history = [start]
        for i, goal in enumerate(y.tensor_split(self.spoilt["count"])):
            received = torch.empty(len(goal), self.module[0].in_features, dtype=x.dtype)
            dist.recv(received, 0)
            received.requires_grad_()
            used = history[max(0, i - 1)] if self.spoilt.get("vertical") else history[-1]
            weights = self.stashed(start if self.spoilt.get("frozen") else used)
            out = torch.func.functional_call(self.module, weights, (received,))
            (MSE(out, goal) / self.spoilt.get("divided", 1)).backward()
            dist.send(received.grad, 0)
            self.update(weights)
            history.append({name: p.detach().clone() for name, p in self.module.named_parameters()})
        return torch.zeros(()), None


def dream(*, vertical_sync=False, world=None, count=7, **spoilt):
    check_pipedream(
        starter(DreamByHand, count=count, **spoilt),
        net,
        MSE,
        batches(14)[0],
        world or get_world("sim"),
        world_size=2,
        n_microbatches=count,
        optimizer=SGD,
        vertical_sync=vertical_sync,
    )


def test_check_pipedream_accepts(world):
    dream(world=world)
    dream(world=world, vertical=True, vertical_sync=True)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"not_stashed": True},
            r"pipeline: rank 0 ends with \S+ at \(0, 0\) of parameter '0.\w+', right is \S+\n"
            r"  likely cause  forward and backward pass of a micro-batch used different weights",
        ),
        ({"vertical": True}, r"all stages use the version of stage 0: vertical sync"),
        ({"vertical_sync": True}, r"weights are stashed, without vertical sync"),
        ({"divided": 7}, r"gradients are divided by n_microbatches = 7"),
        ({"frozen": True}, r"rank 0 ends with \S+ at .* of parameter '0"),
    ],
    ids=["not stashed", "vertical", "not vertical", "divided", "frozen"],
)
def test_check_pipedream_rejects(keywords, message):
    with pytest.raises(AssertionError, match=message):
        dream(**keywords)


def test_check_pipedream_does_not_decide_where_all_rules_agree():
    with pytest.raises(Inconclusive, match="no fault would show"):
        dream(count=1)
