"""``check_sharded_layer`` on experts, on attention over divided positions, and on outputs that are not floats."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_sharded_layer

from ..layers_by_hand import Columns, Join, Mlp, X, mlp, parameter, part, positions


class Experts(nn.Module):
    """A layer that sends each token to the expert that the first feature selects."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        outputs = torch.stack([expert(x) for expert in self.experts])
        chosen = (x[..., 0] > 0).long()
        return torch.gather(outputs, 0, chosen[None, ..., None].expand(1, *x.shape))[0]


class Expert(nn.Module):
    """The expert of this rank, which gets the tokens of all ranks; each rank keeps the results of its own tokens."""

    def __init__(self, whole, forgets=False):
        super().__init__()
        own = whole.experts[dist.get_rank()]
        self.weight, self.bias, self.forgets = parameter(own.weight), parameter(own.bias), forgets

    def forward(self, x):
        everyones = Tokens.apply(x, self.forgets)
        mine = (everyones[..., :1] > 0).long() == dist.get_rank()
        return Return.apply(torch.where(mine, everyones @ self.weight.T + self.bias, 0))


class Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forgets):
        ctx.forgets = forgets
        return Join.forward(ctx, x, 0, False)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        if not ctx.forgets:
            dist.all_reduce(grad)
        return part(grad, 0), None


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        y = y.clone()
        dist.all_reduce(y)
        return part(y, 0)

    @staticmethod
    def backward(ctx, grad):
        return Join.forward(ctx, grad, 0, False)


def forgetful_expert(whole):
    return Expert(whole, forgets=True)


def samples(x):
    return part(x, 0)


def test_accepts_experts(world):
    check_sharded_layer(Expert, Experts, [X], world, world_size=2, inputs_of=samples, output_of=samples)


def test_rejects_experts_whose_tokens_learn_from_their_own_rank(world):
    with pytest.raises(AssertionError, match=r"rank 0 holds 0 at \(1, 0, 0\) of the gradient of its input, the whole"):
        check_sharded_layer(forgetful_expert, Experts, [X], world, world_size=2, inputs_of=samples, output_of=samples)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Gathered(nn.Module):
    def __init__(self, whole, own_only=False):
        super().__init__()
        self.own_only = own_only

    def forward(self, q, k, v):
        if not self.own_only:
            k, v = AllPositions.apply(k), AllPositions.apply(v)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class AllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Join.forward(ctx, x, 1, False)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return part(grad, 1)


def of_own_positions(whole):
    return Gathered(whole, own_only=True)


def each_position(*tensors):
    return tuple(map(positions, tensors)) if len(tensors) > 1 else positions(*tensors)


def test_accepts_attention_over_divided_positions(world):
    batch = (X, X.flip(0), X.flip(1))
    check_sharded_layer(
        Gathered, Attention, [batch], world, world_size=3, inputs_of=each_position, output_of=each_position
    )


def test_rejects_attention_to_own_positions(world):
    own = {"inputs_of": each_position, "output_of": each_position}
    with pytest.raises(AssertionError, match=r"of_own_positions: batch 0: rank 0 returns \S+ at \(0, 0, 0\), "):
        check_sharded_layer(of_own_positions, Attention, [(X, X, X)], world, world_size=3, **own)


class Chooses(nn.Module):
    """A layer that returns the best expert and its score."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(6, 4)

    def forward(self, x):
        scores, chosen = self.scores(x).max(-1)
        return scores, chosen, chosen > 0


class ChoosesAmongAll(nn.Module):
    def __init__(self, whole, own_first=False):
        super().__init__()
        self.scores, self.own_first = Columns(whole.scores, joins=True), own_first

    def forward(self, x):
        scores, chosen = self.scores(x).max(-1)
        return scores, (chosen - 2 * dist.get_rank()) % 4 if self.own_first else chosen, chosen > 0


def counts_from_its_own(whole):
    return ChoosesAmongAll(whole, own_first=True)


def test_accepts_outputs_of_several_dtypes(world):
    check_sharded_layer(ChoosesAmongAll, Chooses, [X], world, world_size=2)


def test_rejects_integers_that_differ(world):
    with pytest.raises(AssertionError, match=r"rank 1 returns \d at \(0, 0\), the whole layer \d\n"):
        check_sharded_layer(counts_from_its_own, Chooses, [X], world, world_size=2)


def test_a_shape_that_is_wrong_on_one_rank_is_told_although_others_communicate(world):
    class Half(Mlp):
        def forward(self, x):
            y = super().forward(x)
            return y[:1] if dist.get_rank() == 1 else y

    with pytest.raises(AssertionError, match=r"rank 1 returns shape \(1, 3, 5\), expected shape \(4, 3, 5\)"):
        check_sharded_layer(Half, mlp, [X], world, world_size=2)


@pytest.mark.parametrize(("op", "told"), [(dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean")])
def test_gradients_of_experts_that_are_added_as_those_of_copies_are_told(world, op, told):
    def as_of_copies(expert):
        for one in expert.parameters():
            dist.all_reduce(one.grad)
            if op == dist.ReduceOp.AVG:
                one.grad /= dist.get_world_size()

    cause = f"it is the {told} over ranks that have other elements of the whole layer under this name: each keeps"
    with pytest.raises(AssertionError, match=cause):
        check_sharded_layer(
            Expert, Experts, [X], world, world_size=2, inputs_of=samples, output_of=samples, sync=as_of_copies
        )
