"""The check of PipeDream rejects pipelines whose backward passes use other weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_pipedream
from pdlcheck.errors import Inconclusive
from pdlcheck.worlds import get_world

from ..pipelines_by_hand import MSE, ByHand, batches, net, starter

SGD = partial(torch.optim.SGD, lr=0.1)


class DreamByHand(ByHand):
    """1F1B of two stages, which step after every micro-batch; ``spoilt`` breaks the weights that a stage stashes."""

    def __init__(self, model, **spoilt):
        super().__init__(model, **spoilt)
        self.optimizer, self.updates = SGD(self.module.parameters()), 0

    def passes(self, x, i, used):
        weights = self.stashed(used)
        return weights, torch.func.functional_call(self.module, weights, (x,))

    def stashed(self, used):
        return {name: p.detach().clone().requires_grad_() for name, p in used.items()}

    def update(self, weights):
        self.updates += 1
        if self.rank and self.updates == self.spoilt.get("skipped"):
            return
        for name, parameter in self.module.named_parameters():
            if self.spoilt.get("goes_back"):
                parameter.data.copy_(weights[name])
            parameter.grad = weights[name].grad * (1 if self.rank else self.spoilt.get("multiplied", 1))
        self.optimizer.step()

    def first(self, x):
        """Run F0 F1 B0 F2 B1 ..., with two versions of the weights at a time."""
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


class OptimizerForEach(DreamByHand):
    """A stage with an optimizer for each of its parameters."""

    def __init__(self, model, **spoilt):
        super().__init__(model, **spoilt)
        self.optimizer, self.each = self, [SGD([parameter]) for parameter in self.module.parameters()]

    def step(self, *batch):
        if batch:
            return super().step(*batch)
        for one in self.each:
            one.step()
        return None


def dream(*, vertical_sync=False, world=None, count=7, kind=DreamByHand, make=net, **spoilt):
    check_pipedream(
        starter(kind, count=count, **spoilt),
        make,
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
            r"  wrong weights  2 of 2 on rank 0: '0.weight', '0.bias'; 2 of 2 on rank 1: '2.weight', '2.bias'\n"
            r"  updates        the first that is wrong is that of micro-batch 1 on rank 0; it is right on 1\n"
            r"  likely cause   backward passes run at the latest weights, forward passes do not: keep ",
        ),
        (
            {"goes_back": True},
            r"micro-batch 1 on rank 0; it is right on 1\n"
            r"  likely cause   no known cause fits; .* a later one may have used other weights backwards than forwards",
        ),
        ({"vertical": True}, r"likely cause   versions are those of stage 0: vertical sync"),
        ({"vertical_sync": True}, r"weights are stashed, without vertical sync"),
        ({"divided": 7}, r"gradients are divided by n_microbatches = 7"),
        (
            {"frozen": True},
            r"rank 0 ends [\s\S]* in stage 1 alone weights are those of the start for all micro-batches",
        ),
        (
            {"multiplied": 2},
            r"micro-batch 0 on rank 0; it is right on 1\n"
            r"  likely cause   no known cause fits; .*; note: all weights were those of the start",
        ),
        (
            {"skipped": 7},
            r"none on rank 0\n  updates        rank 1 steps its optimizer 6 times for 7 micro-batches\n"
            r"  likely cause   no known cause fits; ",
        ),
    ],
    ids=["not stashed", "goes back", "vertical", "not vertical", "divided", "frozen", "multiplied", "skipped"],
)
def test_check_pipedream_rejects(keywords, message):
    with pytest.raises(AssertionError, match=message):
        dream(**keywords)


def test_check_pipedream_does_not_decide_where_all_rules_agree():
    with pytest.raises(Inconclusive, match="no fault would show"):
        dream(count=1)


def test_a_stage_may_have_several_optimizers():
    dream(kind=OptimizerForEach)
    with pytest.raises(AssertionError, match=r"the first that is wrong is that of micro-batch 1 on rank 0"):
        dream(kind=OptimizerForEach, not_stashed=True)


class NotOfTorch:
    """An optimizer that is not torch's, whose steps the check cannot observe."""

    def __init__(self, params):
        self.params = list(params)

    def step(self):
        with torch.no_grad():
            for parameter in self.params:
                parameter -= 0.1 * parameter.grad


class OwnOptimizer(DreamByHand):
    def __init__(self, model, **spoilt):
        super().__init__(model, **spoilt)
        self.optimizer = NotOfTorch(self.module.parameters())


def test_an_optimizer_that_is_not_torchs_is_compared_at_its_end():
    dream(kind=OwnOptimizer)
    with pytest.raises(
        AssertionError,
        match=r"rank 0 ends with \S+ at .*\n  wrong weights  .*\n  likely cause   backward passes run at ",
    ):
        dream(kind=OwnOptimizer, not_stashed=True)


def test_check_pipedream_does_not_decide_on_random_numbers():
    class Noisy(torch.nn.Tanh):
        def forward(self, x):
            return super().forward(x) + torch.randn_like(x)

    def noisy():
        model = net()
        model[1] = Noisy()
        return model

    with pytest.raises(
        Inconclusive, match="pipeline: one process gets other weights each time: the model draws random"
    ):
        dream(make=noisy)
