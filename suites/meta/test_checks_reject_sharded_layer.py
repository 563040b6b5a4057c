"""``check_sharded_layer`` on layers that are divided over ranks by hand: each right one has broken twins."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pdlcheck.checks import check_sharded_layer
from pdlcheck.errors import Inconclusive

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))  # samples, positions, features
TOKENS = torch.tensor([[0, 4, 2], [7, 7, 1], [3, 5, 6], [6, 0, 1]])


def part(x, dim=-1):
    return x.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def positions(x):
    return part(x, 1)


class Copy(torch.autograd.Function):
    """Into the parallel part: gradients are added over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Add(torch.autograd.Function):
    """Out of the parallel part: outputs are added over ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Join(torch.autograd.Function):
    """Outputs are joined over ranks along a dimension."""

    @staticmethod
    def forward(ctx, x, dim, wrong):
        ctx.dim = dim
        if wrong:  # blocks lie one after the other, whatever the dimension
            out = x.new_empty(*x.shape[:-1], x.shape[-1] * dist.get_world_size())
            blocks = list(out.view(dist.get_world_size(), -1).unbind())
            dist.all_gather(blocks, x.reshape(-1))
            return torch.stack(blocks).view(out.shape)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        return part(grad, ctx.dim), None, None


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def parameter(tensor):
    return nn.Parameter(tensor.detach().clone())


# -- two linear layers, of which the hidden features are divided -------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))


class Mlp(nn.Module):
    def __init__(self, whole, into=Copy, out=Add, bias_on_each=False, other_part=False):
        super().__init__()
        first, last = whole[0], whole[2]
        self.w1, self.b1 = nn.Parameter(part(first.weight, 0)), nn.Parameter(part(first.bias))
        self.w2, self.b2 = nn.Parameter(part(last.weight)), parameter(last.bias)
        if other_part:
            chunks = first.bias.detach().chunk(dist.get_world_size())
            self.b1 = parameter(chunks[(dist.get_rank() + 1) % dist.get_world_size()])
        self.into, self.out, self.bias_on_each = into, out, bias_on_each

    def forward(self, x):
        y = torch.tanh(self.into.apply(x) @ self.w1.T + self.b1) @ self.w2.T
        return self.out.apply(y + self.b2) if self.bias_on_each else self.out.apply(y) + self.b2


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
            r"rank 0 holds \S+ at \(0, 0\) of the gradient of 'w1', [^$]*  likely cause    it is world_size = 2 times "
            "too large: summed over ranks once too often",
        ),
        (with_the_bias_on_each, r"rank 0 returns [^$]*  likely cause    '2.bias' is added on each rank, before"),
        (with_the_bias_of_another, r"batch 0: rank 0 returns \S+ at \(0, 0, 0\), the whole layer"),
    ],
)
def test_rejects_two_linear_layers(world, shard, message):
    with pytest.raises(AssertionError, match=message):
        check_sharded_layer(shard, mlp, [X], world, world_size=2)


def tensor_parallel(whole):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def test_accepts_what_torch_makes_of_them(world):
    check_sharded_layer(tensor_parallel, mlp, [X], world, world_size=2)


# -- which elements a rank holds -----------------------------------------------------------------------


class Columns(nn.Module):
    """The output is divided, and joined where ``joins``."""

    def __init__(self, whole, joins=False, wrong=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(part(whole.weight, 0)), nn.Parameter(part(whole.bias))
        self.joins, self.wrong = joins, wrong

    def forward(self, x):
        y = Copy.apply(x) @ self.weight.T + self.bias
        return Join.apply(y, -1, self.wrong) if self.joins else y


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


# -- a vocabulary with padding -----------------------------------------------------------------------------


class Vocabulary(nn.Module):
    """7 words and one that is padding, divided over ranks."""

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


# -- a norm whose positions are divided, and whose parameters are not ----------------------------------------


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
    message = rf"rank 0 holds \S+ at \(0,\) of the gradient of 'weight', [^$]*  likely cause    {re.escape(cause)}"
    with pytest.raises(AssertionError, match=message):
        check_norm(world, sync)


def test_rejects_copies_that_add_in_orders_of_their_own(world):
    message = "ranks 0 and 1 hold copies of 'weight', whose gradients differ in some bits"
    with pytest.raises(AssertionError, match=message):
        check_norm(world, add_in_own_order)


# -- experts, each on a rank, and tokens that are divided -------------------------------------------------------


class Experts(nn.Module):
    """Tokens go to the expert that the first feature says."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x):
        outputs = torch.stack([expert(x) for expert in self.experts])
        chosen = (x[..., 0] > 0).long()
        return torch.gather(outputs, 0, chosen[None, ..., None].expand(1, *x.shape))[0]


class Expert(nn.Module):
    """That of this rank sees all tokens, and each rank keeps those that are its own."""

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


# -- attention over divided positions, without parameters ---------------------------------------------------------


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


# -- outputs that are no numbers ------------------------------------------------------------------------------------


class Chooses(nn.Module):
    """Returns which expert is best, and its score."""

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


# -- what cannot be checked ----------------------------------------------------------------------------------------


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
        ({"batches": [3]}, TypeError, "batches must return a tensor"),
        ({"world_size": 1}, ValueError, "world_size must be at least 2, got 1"),
        ({"world": "sim"}, TypeError, "takes as world the fixture"),
        ({"shard": lambda whole: None}, TypeError, "shard must return the module of this rank, it returned NoneType"),
        ({"inputs_of": lambda x: None}, TypeError, "inputs_of must return a tensor or a tuple of tensors"),
        ({"make": lambda: nn.Linear(6, 2, dtype=torch.complex64)}, TypeError, "takes real parameters, 'weight' is"),
        ({"make": norm()}, TypeError, "make must be a function that makes the model"),
    ],
)
def test_refuses_what_it_cannot_take(world, arguments, error, message):
    given = {"shard": itself, "make": norm, "batches": [X], "world": world, "world_size": 2} | arguments
    with pytest.raises(error, match=message):
        check_sharded_layer(**given)


class RowParallel(nn.Module):
    """``y = x W + b``; a rank has rows of W, and ``add`` puts the parts together."""

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
