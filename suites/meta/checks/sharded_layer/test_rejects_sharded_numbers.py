"""``check_sharded_layer`` on float32, infinities, copies in other layouts, and a part that is cut twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pdlcheck.checks import check_sharded_layer
from pdlcheck.errors import CheckFailed

from ..layers_by_hand import Add, Copy, part


class Whole(nn.Module):
    """A head and its cross entropy, which is computed in float32 for every dtype of the head."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 12, bias=False)

    def forward(self, x, targets):
        return F.cross_entropy(self.out(x).float(), targets, reduction="none")


class Divided(nn.Module):
    """A head with a part of the vocabulary on each rank."""

    def __init__(self, whole, scale=1.0):
        super().__init__()
        self.out = nn.Linear(8, 12 // dist.get_world_size(), bias=False)
        self.out.weight.data = part(whole.out.weight, 0)
        self.scale = scale

    def forward(self, x, targets):
        logits = self.out(Copy.apply(x)).float()
        size = logits.shape[1]
        mine = targets // size == dist.get_rank()
        picked = torch.where(mine, logits.gather(1, (targets % size)[:, None])[:, 0], 0)
        return torch.log(Add.apply(logits.exp().sum(1))) - self.scale * Add.apply(picked)


BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) * 2


def test_a_layer_that_computes_in_float32_is_compared_in_it(world):
    check_sharded_layer(Divided, Whole, [BATCH], world, world_size=2, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"likely cause +it differs by no more than float32 rounds: .*pass dtype="):
        check_sharded_layer(Divided, Whole, [BATCH], world, world_size=2)


def test_in_float32_too_what_is_wrong_is_rejected(world):
    with pytest.raises(AssertionError, match=r"rank 0 returns .* the whole layer") as told:
        check_sharded_layer(
            lambda whole: Divided(whole, 0.999), Whole, [BATCH], world, world_size=2, dtype=torch.float32
        )
    assert "float32 rounds" not in str(told.value)
    with pytest.raises(ValueError, match=r"compares in torch.float64 or torch.float32, got dtype=torch.float16"):
        check_sharded_layer(Divided, Whole, [BATCH], world, world_size=2, dtype=torch.float16)


class Masked(nn.Module):
    def __init__(self, weight=None, mask=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4) if weight is None else weight)
        self.register_buffer("mask", torch.arange(6) > 3 if mask is None else mask)

    def forward(self, x):
        return (x @ self.weight.T).masked_fill(self.mask, float("-inf"))


class MaskedPart(Masked):
    def forward(self, x):
        return super().forward(Copy.apply(x))


def test_masked_outputs_are_infinite_on_both_sides(world):
    inputs = [torch.randn(5, 4)]

    def check(mask):
        check_sharded_layer(
            lambda whole: MaskedPart(part(whole.weight, 0), mask(whole)),
            Masked,
            inputs,
            world,
            world_size=2,
            output_of=part,
        )

    check(lambda whole: part(whole.mask))
    with pytest.raises(AssertionError, match=r"rank 1 returns .* at \(0, 1\), the whole layer -inf"):
        check(lambda whole: torch.zeros(3, dtype=torch.bool))


class Gathered(nn.Module):
    """A layer whose output rank 0 alone returns."""

    def __init__(self, whole, factor=1.0):
        super().__init__()
        if dist.get_rank() == 0:
            self.weight = nn.Parameter(whole.weight.detach().clone())
        self.factor = factor

    def forward(self, x):
        return (self.factor * (x @ self.weight.T),) if dist.get_rank() == 0 else ()


def on_rank_0(output):
    return (output,) if dist.get_rank() == 0 else ()


def test_ranks_may_return_other_numbers_of_outputs(world):
    def check(shard):
        check_sharded_layer(
            shard, lambda: nn.Linear(4, 3, bias=False), [torch.randn(2, 4)], world, world_size=2, output_of=on_rank_0
        )

    def inputs_without_gradient(whole):
        return Gathered(whole)

    with pytest.raises(AssertionError, match=r"rank 1 holds 0 at \(0, 0\) of the gradient of its input"):
        check(inputs_without_gradient)
    with pytest.raises(AssertionError, match=r"rank 0 returns .* at \(0, 0\), the whole layer"):
        check(lambda whole: Gathered(whole, 2.0))


class Cut(nn.Module):
    """A layer with a part of the output features."""

    def __init__(self, whole, part):
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(dist.get_world_size())[part].clone())

    def forward(self, x):
        return x @ self.weight.T


def test_a_part_that_all_ranks_cut_is_told_from_one_that_does_not_divide(world):
    x = [torch.randn(2, 4)]
    with pytest.raises(
        AssertionError, match=r"no rank holds .*\n.*\n.*8 others of it are held by several ranks: these c"
    ):
        check_sharded_layer(lambda whole: Cut(whole, 0), lambda: nn.Linear(4, 4, bias=False), x, world, world_size=2)
    with pytest.raises(
        AssertionError, match=r"no rank holds .*\n.*\n.*what is left over where a dimension does not di"
    ):
        check_sharded_layer(lambda whole: Cut(whole, 0), lambda: nn.Linear(4, 3, bias=False), x, world, world_size=2)


class SomeLayers(nn.Module):
    """Layers of one shape, of which each rank holds some whole ones."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("held_on", "cause"),
    [
        (lambda rank: [0, 1], "each rank takes the part of one rank, as by numbers or names of layers that begin anew"),
        (lambda rank: [0, 1, 2], None),  # the last one is forgotten
        (lambda rank: [0, 1 + rank], None),
    ],
    ids=["the first half", "all except one", "one is replicated"],
)
def test_layers_that_all_ranks_take_are_told_from_a_forgotten_one(world, held_on, cause):
    def shard(whole):
        return SomeLayers([whole.layers[index] for index in held_on(dist.get_rank())])

    def make():
        return SomeLayers([nn.Linear(3, 3) for _ in range(4)])

    with pytest.raises(CheckFailed, match="no rank holds the element") as raised:
        check_sharded_layer(shard, make, [torch.randn(2, 3)], world, world_size=2)
    assert cause in raised.value.cause if cause else raised.value.cause is None


class Rolled(nn.Module):
    """A sequence-parallel layer: each rank holds all rows of the weight, its own first."""

    def __init__(self, whole):
        super().__init__()
        self.rank = dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().roll(-self.rank, 0).clone())

    def forward(self, x):
        return (x @ self.weight.T).roll(self.rank, -1)

    def total(self, order):
        """Replace the gradient by the sum over ranks, added in the given order of ranks."""
        own = self.weight.grad.roll(self.rank, 0).contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        total = parts[order[0]].clone()
        for rank in order[1:]:
            total += parts[rank]
        self.weight.grad = total.roll(-self.rank, 0)


def shards(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def test_copies_in_another_layout_must_have_the_same_bits(world):
    def check(sync):
        check_sharded_layer(
            Rolled,
            lambda: nn.Linear(6, 3, bias=False),
            [torch.randn(12, 6, generator=torch.Generator().manual_seed(1))],
            world,
            world_size=3,
            inputs_of=shards,
            output_of=shards,
            sync=sync,
        )

    check(lambda module: module.total([0, 1, 2]))
    with pytest.raises(
        AssertionError, match=r"ranks 0 and \d hold copies of elements of 'weight', whose gradients differ"
    ):
        check(lambda module: module.total([(module.rank + step) % 3 for step in range(3)]))
