"""check_sharded_layer on layers that use no gradient of some inputs, such as masks, or of any."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pdlcheck.checks import check_sharded_layer

from ..layers_by_hand import Add, Copy, part

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
MASK, POSITIONS, ANGLES = torch.tensor([1.0, 0.0, 1.0]), torch.arange(3.0), torch.tensor([0.0, 0.5, 1.0])


class Layer(nn.Module):
    """Two layers, whose outputs are multiplied by a number for each position."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x, each):
        return self.down(torch.relu(self.up(x))) * each.cos().unsqueeze(-1)


class Divided(nn.Module):
    """The layer with its inner features divided; ``enter`` adds the gradients of its input."""

    def __init__(self, whole, enter=Copy.apply, of=lambda each: each):
        super().__init__()
        self.up, self.down = nn.Parameter(part(whole.up.weight, 0)), nn.Parameter(part(whole.down.weight, 1))
        self.enter, self.of = enter, of

    def forward(self, x, each):
        partial = F.linear(torch.relu(F.linear(self.enter(x), self.up)), self.down)
        return Add.apply(partial * self.of(each).cos().unsqueeze(-1))  # the part of a rank leads to ``each``


def without_gradient(whole):
    return Divided(whole, of=torch.Tensor.detach)


def never_added(whole):
    return Divided(whole, enter=torch.clone)


def check(world, shard, *batch, make=Layer):
    check_sharded_layer(shard, make, [batch], world, world_size=2)


@pytest.mark.parametrize("shard", [Divided, without_gradient])
@pytest.mark.parametrize("each", [MASK, POSITIONS], ids=["mask", "positions"])
def test_masks_and_positions_need_no_gradient(world, shard, each):
    check(world, shard, X, each)


def test_of_other_inputs_those_count_that_require_a_gradient(world):
    cure = "cure +if no gradient of it is used, as of a mask, call requires_grad_.. on the other inputs in batches"
    with pytest.raises(AssertionError, match=rf"of the gradient of input 1, the whole layer (?s:.*){cure}"):
        check(world, without_gradient, X, ANGLES)
    check(world, without_gradient, X.clone().requires_grad_(), ANGLES)
    with pytest.raises(AssertionError, match="of the gradient of input 1, the whole layer") as raised:
        check(world, without_gradient, X.clone().requires_grad_(), ANGLES.clone().requires_grad_())
    assert "cure" not in str(raised.value)


@pytest.mark.parametrize("x", [X, X.clone().requires_grad_(), torch.ones(3, 4)], ids=["drawn", "marked", "ones"])
def test_the_gradient_of_another_input_is_still_compared(world, x):
    with pytest.raises(AssertionError, match="of the gradient of input 0, the whole layer"):
        check(world, never_added, x, MASK)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.out(x)


class HeadWithoutGradients(Head):
    @torch.no_grad()
    def forward(self, x):
        return self.out(x)


class Inference(nn.Module):
    """The head under no_grad(), with its inputs divided."""

    def __init__(self, whole):
        super().__init__()
        self.out = nn.Parameter(part(whole.out.weight))

    @torch.no_grad()
    def forward(self, x):
        return Add.apply(F.linear(x.chunk(dist.get_world_size(), -1)[dist.get_rank()], self.out))


def test_a_layer_that_is_meant_to_have_no_gradients_is_compared_with_one_that_has_none(world):
    check(world, Inference, X, make=HeadWithoutGradients)
    cure = r"cure +if the layer is meant to have no gradients, as under torch.no_grad\(\), let make return one that"
    with pytest.raises(AssertionError, match=rf"gradient of 'out', the whole layer (?s:.*){cure} has none either"):
        check(world, Inference, X, make=Head)


class Choice(nn.Module):
    def forward(self, x):
        return x.softmax(-1).argmax(-1)


def test_integers_are_compared_without_gradients(world):
    check(world, lambda whole: Choice(), X, make=Choice)
