"""``check_sharded_layer`` on layers that are divided over ranks by hand; each correct layer has broken twins."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pdlcheck.checks import check_sharded_layer
from pdlcheck.errors import Inconclusive

from ..layers_by_hand import (
    TOKENS,
    Add,
    Columns,
    Copy,
    Mlp,
    Same,
    X,
    mlp,
    parameter,
    part,
    positions,
    with_a_way_back,
    without_a_way_back,
)


@pytest.mark.parametrize("world_size", [2, 3])
def test_accepts_two_linear_layers(world, world_size):
    check_sharded_layer(Mlp, mlp, [X, X[:1]], world, world_size=world_size)


def without_sum_of_gradients(whole):
    return Mlp(whole, into=Same)


def without_sum_of_outputs(whole):
    return Mlp(whole, out=Same)


def with_gradients_summed_twice(whole):
    class Both(Add):
        backward = Copy.backward

    return Mlp(whole, out=Both)


def with_the_bias_on_each(whole):
    return Mlp(whole, bias_on_each=True)


def with_the_bias_of_another(whole):
    return Mlp(whole, other_part=True)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (
            without_sum_of_gradients,
            r"without_sum_of_gradients: batch 0: rank 0 holds \S+ at \(0, 0, 0\) of the gradient of its input, "
            r"the whole layer \S+\n.*\n  likely cause    it is this rank's own part: all ranks' parts add up",
        ),
        (without_sum_of_outputs, r"batch 0: rank 0 returns \S+ at \(0, 0, 0\), the whole layer \S+\n"),
        (
            with_gradients_summed_twice,
            r"rank 0 holds \S+ at \(0, 0\) of the gradient of 'w1', [^$]*  wrong gradients  \d of 4 on every rank: 'w1'"
            "[^$]*  likely cause     it is world_size = 2 times "
            "too large: summed over ranks once too often",
        ),
        (with_the_bias_on_each, r"rank 0 returns [^$]*  likely cause    '2.bias' is added on each rank, before"),
        (with_the_bias_of_another, r"batch 0: rank 0 returns \S+ at \(0, 0, 0\), the whole layer"),
    ],
)
def test_rejects_two_linear_layers(world, shard, message):
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(shard, mlp, [X], world, world_size=2)


class Scaled(nn.Module):
    """A scale that every rank holds, and divided linear layers behind it, with or without a residual connection."""

    def __init__(self, layers, scale, residual):
        super().__init__()
        self.layers, self.scale, self.residual = layers, parameter(scale), residual

    def forward(self, x):
        y = self.layers(x * self.scale)
        return x + y if self.residual else y


def scaled(residual):
    return Scaled(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)), torch.rand(6) + 1, residual)


@pytest.mark.parametrize("residual", [False, True])
def test_a_missing_sum_behind_a_replicated_parameter_is_told_by_the_gradient_of_the_input(world, residual):
    def shard(whole, into=Same):
        return Scaled(Mlp(whole.layers, into=into), whole.scale, residual)

    check_sharded_layer(partial(shard, into=Copy), partial(scaled, residual), [X], world, world_size=2)
    message = (
        r"of the gradient of 'scale'[^$]*  likely cause     it is this rank's own part, and so is the gradient of the "
        "layer's input: the backward pass through the sharded layers does not add the gradient of their input over"
    )
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(shard, partial(scaled, residual), [X], world, world_size=2)


def test_a_missing_sum_beside_a_residual_connection_is_told(world):
    def shard(whole):
        made = Scaled(Mlp(whole.layers, into=Same), whole.scale, residual=True)
        made.scale.requires_grad_(False)
        return made

    def whole():
        made = scaled(residual=True)
        made.scale.requires_grad_(False)
        return made

    message = (
        r"of the gradient of its input[^$]*own part beside a residual connection: all parts, and that once, add up"
    )
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(shard, whole, [X], world, world_size=2)


class ScaledInside(nn.Module):
    """Divided linear layers with a scale between them that every rank holds."""

    def __init__(self, whole):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(part(whole.w1, 0)), nn.Parameter(part(whole.w2))
        self.scale, self.into = parameter(whole.scale), whole.into

    def forward(self, x):
        return Add.apply((self.into.apply(x) @ self.w1.T * self.scale) @ self.w2.T)


class WholeInside(nn.Module):
    def __init__(self, into):
        super().__init__()
        self.into = into
        self.w1, self.w2 = nn.Parameter(torch.randn(12, 6)), nn.Parameter(torch.randn(5, 12))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = x.detach() if self.into is Cut else x
        return (x @ self.w1.T * self.scale) @ self.w2.T


class Cut:
    """The entry of a parallel part that no gradient leaves."""

    apply = torch.Tensor.detach


@pytest.mark.parametrize("into", [Copy, Cut])
def test_a_gradient_that_only_the_parameter_lacks_is_told_apart(world, into):
    message = r"of the gradient of 'scale'[^$]*own part: 2 ranks hold the parameter, and their sum is right"
    with pytest.raises(AssertionError, match=message) as caught:
        check_sharded_layer(ScaledInside, partial(WholeInside, into), [X], world, world_size=2)
    assert "input" not in str(caught.value)


def tensor_parallel(whole):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_accepts_what_torch_makes_of_them(world):
    check_sharded_layer(tensor_parallel, mlp, [X], world, world_size=2)


@pytest.mark.parametrize("layout", [Replicate(), Shard(0), Shard(2)], ids=str)
def test_an_output_that_is_a_dtensor_is_looked_at_whole(world, layout):
    def shard(whole):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        out = RowwiseParallel(output_layouts=layout, use_local_output=False)
        return parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": out})

    def without_gradients_of_the_input(whole):
        made = shard(whole)
        made.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach() + 0 * inputs[0],))
        return made

    check_sharded_layer(shard, mlp, [X], world, world_size=2)
    with pytest.raises(AssertionError, match=r"at \(0, 0, 0\) of the gradient of its input[^$]*it is zero, or None"):
        check_sharded_layer(without_gradients_of_the_input, mlp, [X], world, world_size=2)


def joined(whole):
    return Columns(whole, joins=True)


def joined_in_the_order_of_ranks(whole):
    return Columns(whole, joins=True, wrong=True)


def drawn(whole):
    made = Columns(whole)
    made.bias = nn.Parameter(torch.rand(made.bias.shape) - 2)
    return made


def without_the_rest(whole):
    made = Columns(whole)
    each = len(whole.bias) // dist.get_world_size()
    mine = slice(each * dist.get_rank(), each * (dist.get_rank() + 1))
    made.weight, made.bias = parameter(whole.weight[mine]), parameter(whole.bias[mine])
    return made


def first_features(y):
    each = y.shape[-1] // dist.get_world_size()
    return y[..., each * dist.get_rank() : each * (dist.get_rank() + 1)]


def test_accepts_an_output_that_is_divided(world):
    check_sharded_layer(Columns, lambda: nn.Linear(6, 8), [X], world, world_size=2, output_of=part)


def test_accepts_an_output_that_is_joined(world):
    check_sharded_layer(joined, lambda: nn.Linear(6, 8), [X], world, world_size=2)


def test_rejects_parts_that_are_joined_along_another_dimension(world):
    message = r"rank 0 returns \S+ at \(0, 0, 4\)[^$]*parts of dimension 2 are joined along dimension 0"
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(joined_in_the_order_of_ranks, lambda: nn.Linear(6, 8), [X], world, world_size=2)


def test_rejects_an_output_of_another_shape(world):
    message = r"rank 0 returns shape \(4, 3, 4\), expected shape \(4, 3, 8\)\n.*output_of"
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(Columns, lambda: nn.Linear(6, 8), [X], world, world_size=2)


def test_rejects_a_parameter_that_is_no_part_of_the_whole(world):
    message = r"drawn: rank 0 holds -\S+ at \(0,\) of parameter 'bias', which is no element of the whole layer\n.*drawn"
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(drawn, lambda: nn.Linear(6, 8), [X], world, world_size=2, output_of=part)


def test_rejects_a_rest_that_nobody_holds(world):
    message = (
        r"no rank holds the element \(6, 0\) of parameter 'weight' of the whole layer\n"
        r"  held          42 of 49 elements\n  likely cause  what is left over"
    )
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(
            without_the_rest, lambda: nn.Linear(6, 7), [X], world, world_size=2, output_of=first_features
        )


class Vocabulary(nn.Module):
    """An embedding of 7 words and a padding word, divided over ranks."""

    def __init__(self, whole, learns_padding=False):
        super().__init__()
        padded = torch.cat([whole.weight.detach(), torch.zeros(1, whole.weight.shape[1])])
        self.weight = nn.Parameter(part(padded, 0))
        self.learns_padding = learns_padding

    def forward(self, tokens):
        first = dist.get_rank() * len(self.weight)
        outside = (tokens < first) | (tokens >= first + len(self.weight))
        found = nn.functional.embedding((tokens - first).masked_fill(outside, 0), self.weight)
        y = Add.apply(found.masked_fill(outside[..., None], 0))
        return y + self.weight[-1] if self.learns_padding and dist.get_rank() else y


def learns_padding(whole):
    return Vocabulary(whole, learns_padding=True)


def words():
    return nn.Embedding(7, 6)


def test_accepts_a_vocabulary_with_padding(world):
    check_sharded_layer(Vocabulary, words, [TOKENS.clamp(max=6)], world, world_size=2)


def test_rejects_padding_that_learns(world):
    where = r"rank 1 holds \S+ at \(3, 0\) of the gradient of 'weight', the whole layer 0\n"
    message = where + "[^$]*the whole layer has no such element"
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(learns_padding, words, [TOKENS.clamp(max=6)], world, world_size=2)


def norm():
    made = nn.LayerNorm(6)
    nn.init.normal_(made.weight)
    nn.init.normal_(made.bias)
    return made


def itself(whole):
    return whole


def add(module):
    for p in module.parameters():
        dist.all_reduce(p.grad)


def add_twice(module):
    add(module)
    add(module)


def add_in_own_order(module):
    for p in module.parameters():
        parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad)
        p.grad = sum(parts[dist.get_rank() :] + parts[: dist.get_rank()])


def check_norm(world, sync, world_size=3):
    check_sharded_layer(
        itself, norm, [X], world, world_size=world_size, inputs_of=positions, output_of=positions, sync=sync
    )


def test_accepts_a_norm_of_divided_positions(world):
    check_norm(world, add)


@pytest.mark.parametrize(
    ("sync", "cause"),
    [
        (None, "it is this rank's own part: 3 ranks hold the parameter, and their sum is right"),
        (add_twice, "it is 3 times too large: summed once too often over its holders"),
    ],
)
def test_rejects_a_norm_of_divided_positions(world, sync, cause):
    message = rf"rank 0 holds \S+ at \(0,\) of the gradient of 'weight', [^$]*  likely cause     {re.escape(cause)}"
    with pytest.raises(AssertionError, match=message):
        check_norm(world, sync)


def test_rejects_copies_that_add_in_orders_of_their_own(world):
    message = "ranks 0 and 1 hold copies of elements of 'weight', whose gradients differ in some bits"
    with pytest.raises(AssertionError, match=message):
        check_norm(world, add_in_own_order)


def test_a_layer_that_draws_random_numbers_says_nothing(world):
    with pytest.raises(Inconclusive, match="draws random numbers, as dropout does"):
        check_sharded_layer(itself, lambda: nn.Dropout(0.5), [X], world, world_size=2)


def test_an_output_that_depends_on_nothing_says_nothing(world):
    class Zero(nn.Module):
        def forward(self, x):
            return 0 * x

    with pytest.raises(Inconclusive, match="no gradient of the whole layer differs from zero"):
        check_sharded_layer(itself, Zero, [X], world, world_size=2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": []}, ValueError, "needs one or more, got none"),
        ({"batches": X}, TypeError, r"takes as batches a list, one input of the layer each; pass \[batch\]"),
        ({"batches": [3]}, TypeError, "a batch must be a tensor or a tuple of tensors, got a int"),
        ({"world_size": 1}, ValueError, "world_size must be at least 2, got 1"),
        ({"world": "sim"}, TypeError, "takes as world the fixture"),
        ({"shard": lambda whole: None}, TypeError, "shard must return the module of this rank, it returned NoneType"),
        ({"inputs_of": lambda x: None}, TypeError, "what inputs_of returns must be a tensor or a tuple of tensors"),
        ({"make": lambda: nn.Linear(6, 2, dtype=torch.complex64)}, TypeError, "takes real parameters, 'weight' is"),
        ({"make": norm()}, TypeError, "make must be a function that makes the model"),
    ],
)
def test_refuses_what_it_cannot_take(world, arguments, error, message):
    given = {"shard": itself, "make": norm, "batches": [X], "world": world, "world_size": 2} | arguments
    with pytest.raises(error, match=message):
        check_sharded_layer(**given)


class RowParallel(nn.Module):
    """A layer ``y = x W + b`` with some rows of W on each rank; ``add`` combines the parts."""

    def __init__(self, whole, add):
        super().__init__()
        self.weight, self.bias = nn.Parameter(part(whole.weight)), nn.Parameter(whole.bias.detach().clone())
        self.add = add

    def forward(self, x):
        mine = Copy.apply(x).chunk(dist.get_world_size(), -1)[dist.get_rank()]
        return self.add(mine @ self.weight.T) + self.bias


def row_parallel(whole):
    return RowParallel(whole, lambda x: Add.apply(x))


def row_parallel_without_sum(whole):
    return RowParallel(whole, lambda x: x)


def row_parallel_in_a_group_of_its_own(whole):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def alone(x):
        x = x.clone()
        dist.all_reduce(x, group=groups[dist.get_rank()])
        return x

    return RowParallel(whole, alone)


def with_bias():
    layer = nn.Linear(6, 4)
    nn.init.normal_(layer.bias)
    return layer


def row_parallel_with_a_mean(whole):
    return RowParallel(whole, lambda x: Add.apply(x) / dist.get_world_size())


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mean_for_a_sum_is_told_beside_a_bias(world, world_size):
    with pytest.raises(AssertionError, match="'bias' is added to the mean over ranks, where it belongs to the sum"):
        check_sharded_layer(row_parallel_with_a_mean, with_bias, [X], world, world_size=world_size)


@pytest.mark.parametrize("shard", [row_parallel_without_sum, row_parallel_in_a_group_of_its_own])
def test_a_missing_sum_is_told_beside_a_bias(world, shard):
    check_sharded_layer(row_parallel, with_bias, [X], world, world_size=2)
    with pytest.raises(AssertionError, match="it is this rank's own part and 'bias': all parts, and that once, add up"):
        check_sharded_layer(shard, with_bias, [X], world, world_size=2)


@pytest.mark.parametrize(("factor", "told"), [(0.5, "2 times too small"), (3.0, "it is 3 times what it should be")])
def test_a_factor_is_told_where_it_is_no_matter_of_ranks(world, factor, told):
    class Scaled(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.whole = whole

        def forward(self, x):
            return self.whole(x) * factor

    with pytest.raises(AssertionError, match=told) as raised:
        check_sharded_layer(Scaled, with_bias, [X], world, world_size=2)
    assert (", or a factor of 2 is missing" in str(raised.value)) == (factor == 0.5)


class CentredOverRanks(nn.Module):
    """A layer that subtracts the mean over all samples, and scales; each rank holds some samples."""

    def __init__(self, total):
        super().__init__()
        self.scale, self.total = nn.Parameter(torch.ones(6)), total

    def forward(self, x):
        return (x - self.total(x.sum((0, 1))) / 12) * self.scale


@pytest.mark.parametrize("total", [with_a_way_back, without_a_way_back], ids=lambda one: one.__name__)
def test_a_collective_without_a_backward_pass_is_told_by_the_gradient_of_the_input(world, total):
    def shard(whole):
        whole.total = total
        return whole

    def check():
        check_sharded_layer(
            shard,
            lambda: CentredOverRanks(lambda x: x),
            [X],
            world,
            world_size=2,
            inputs_of=partial(part, dim=0),
            output_of=partial(part, dim=0),
            sync=lambda module: dist.all_reduce(module.scale.grad),
        )

    if total is with_a_way_back:
        check()
        return
    with pytest.raises(
        AssertionError, match=r"gradient of its input[\s\S]*way back to the input is cut or wrong, as by a"
    ):
        check()
