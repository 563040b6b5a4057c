"""The check of PipeDream rejects pipelines with other weights in backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_pipedream
from pdlcheck.errors import Inconclusive
from pdlcheck.worlds import get_world

from .pipelines_by_hand import MSE, ByHand, batches, net, starter

SGD = partial(torch.optim.SGD, lr=0.1)


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
