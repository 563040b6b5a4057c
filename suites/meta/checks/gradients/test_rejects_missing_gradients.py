"""If a gradient reaches only some ranks, or none, the checks that call a sync function name these ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_gradients_equal_single_process, check_sharded_layer
from pdlcheck.errors import Deadlock

from ..layers_by_hand import Add, Copy

# in the second batch, all tokens go to the first expert
TOKENS = torch.tensor([[1.0, 2.0, -1.0], [-1.0, 1.0, 0.5], [2.0, 0.5, 1.0]])
BATCHES = [TOKENS, TOKENS.abs()]


class Experts(nn.Module):
    """Two experts behind one scale; the first number of a token chooses the expert."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.experts = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))

    def forward(self, x):
        first = (x[:, :1] > 0).to(x.dtype)
        return self.experts[0](x * self.scale) * first + self.experts[1](x * self.scale) * (1 - first)


class OneExpert(nn.Module):
    """One expert on each rank, and a copy of the scale; a rank without tokens uses neither."""

    def __init__(self, whole):
        super().__init__()
        self.scale = nn.Parameter(whole.scale.detach().clone())
        self.weight = nn.Parameter(whole.experts[dist.get_rank()].weight.detach().clone())

    def forward(self, x):
        x = Copy.apply(x)
        mine = ((x[:, 0] > 0) == (dist.get_rank() == 0)).nonzero()[:, 0]
        out = 0 * x
        if len(mine):
            out = out.index_put((mine,), (x * self.scale)[mine] @ self.weight.T)
        return Add.apply(out)


class DetachedOnRank1(OneExpert):
    def forward(self, x):
        mine = ((x[:, :1] > 0) == (dist.get_rank() == 0)).to(x.dtype)
        scale = self.scale if dist.get_rank() == 0 else self.scale.detach()
        return Add.apply((Copy.apply(x) * scale) @ self.weight.T * mine)


def adds_zeros_too(module):
    if module.scale.grad is None:
        module.scale.grad = torch.zeros_like(module.scale)
    dist.all_reduce(module.scale.grad)


def takes_it_for_granted(module):
    dist.all_reduce(module.scale.grad)


def skips_none(module):
    if module.scale.grad is not None:
        dist.all_reduce(module.scale.grad)


NOTE = "before the call .grad was None: 'scale' on rank 1, 'weight' on rank 1; no gradient has reached it there: give"


def test_an_expert_without_tokens_has_no_gradient(world):
    check_sharded_layer(OneExpert, Experts, BATCHES, world, world_size=2, sync=adds_zeros_too)


@pytest.mark.parametrize(("broken", "error"), [(takes_it_for_granted, TypeError), (skips_none, Deadlock)])
def test_a_function_that_synchronises_meets_none(world, broken, error):
    check_sharded_layer(OneExpert, Experts, BATCHES[:1], world, world_size=2, sync=broken)
    with pytest.raises(error) as caught:
        check_sharded_layer(OneExpert, Experts, BATCHES, world, world_size=2, sync=broken)
    assert any(note.startswith(NOTE) for note in caught.value.__notes__), caught.value.__notes__


def test_a_rank_that_no_gradient_reaches_is_named(world):
    with pytest.raises(AssertionError, match=r"of the gradient of 'scale'[\s\S]*  none reached +'scale' on rank 1, in"):
        check_sharded_layer(DetachedOnRank1, Experts, BATCHES[:1], world, world_size=2, sync=adds_zeros_too)


def average(model, num_samples):
    for p in model.parameters():
        dist.all_reduce(p.grad.mul_(num_samples / 2))


def test_a_rank_without_samples_has_no_gradients(world):
    shards = [(torch.ones(2, 3), torch.zeros(2, 1)), (torch.zeros(0, 3), torch.zeros(0, 1))]
    with pytest.raises(AttributeError) as caught:
        check_gradients_equal_single_process(lambda: nn.Linear(3, 1), nn.MSELoss(), shards, average, world)
    told = "before the call .grad was None: 'weight' on rank 1, 'bias' on rank 1; "
    assert any(note.startswith(told) for note in caught.value.__notes__), caught.value.__notes__
