"""Our DistributedDataParallel keeps its guarantees, on models with which others have failed."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pdlcheck.checks import check_data_parallel, check_same_trajectory

from .models import TINY, Branches, alike, ddp, fitting, gradients, mean_gradients, net, require_close, samples, squared

# -- the promise ------------------------------------------------------------------------------------


@ddp
@settings(max_examples=4)
@given(
    world_size=st.integers(2, 3),
    cap=st.sampled_from([1e-5, 5e-5, 1e-4, 25]),
    as_view=st.booleans(),
    options=st.sampled_from([{"find_unused_parameters": True}, {"static_graph": True}, {}]),
)
def test_it_is_data_parallel_whatever_the_buckets(subject, world, world_size, cap, as_view, options):
    def wrapped(module):
        return subject(module, gradient_as_bucket_view=as_view, **fitting(subject, dict.fromkeys(TINY, cap)), **options)

    # a static graph does not allow accumulation in only some steps
    unused = bool(options)
    check_data_parallel(wrapped, world, world_size=world_size, unused=unused)


def trainer(wrap, optimizer=torch.optim.SGD, **options):
    def train(model, steps):
        wrapped = wrap(model, **options)
        chosen = optimizer(model.parameters(), lr=0.1)
        for step in range(steps):
            chosen.zero_grad()
            squared(wrapped, 10 * step + dist.get_rank()).backward()
            chosen.step()

    return train


@ddp
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_it_trains_as_torchs_does(subject, world, as_view):
    options = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 1e-5}
    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        ours, torchs = (trainer(cls, optimizer, **options) for cls in (subject, TorchDistributedDataParallel))
        check_same_trajectory(ours, torchs, net, world, steps=3)


class Order(nn.Module):
    """A model whose first layers get their gradients first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.first(self.second(self.third(x)).tanh()).tanh()


@pytest.mark.beyond_contract("reductions that begin in the first pass")
@ddp
@pytest.mark.world_size(2)
def test_buckets_follow_the_order_of_readiness_on_rank_0(subject, rank):
    def crossed(model, x):
        return sum(part(x) for part in ((model.first, model.second) if rank else (model.second, model.first)))

    class Crossed(Order):
        def forward(self, x):
            return self.third(crossed(self, x).tanh())

    for make, expected in ((Order, ["first", "second", "third"]), (Crossed, ["third"])):
        model = alike(make)
        wrapped = subject(model, **fitting(subject, TINY))
        for _ in range(2):
            squared(wrapped, rank).backward()
        names = {id(p): n for n, p in model.named_parameters()}
        order = [names[id(p)].split(".")[0] for b in wrapped._reducer.buckets for p in b.params]
        assert list(dict.fromkeys(order))[: len(expected)] == expected
        everyone = [None, None]
        dist.all_gather_object(everyone, order)
        assert everyone[0] == everyone[1]


@pytest.mark.beyond_contract("reductions that begin in the first pass")
@ddp
@pytest.mark.world_size(2)
def test_reduction_begins_while_backward_is_under_way(subject, rank):
    """When the gradient of the first layer is computed, those of the other layers are being reduced."""
    model = alike(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    wrapped = subject(model, **fitting(subject, TINY))
    under_way = []
    model[0].weight.register_hook(
        lambda grad: under_way.append(sum(b.pending is not None for b in wrapped._reducer.buckets))
    )
    for _ in range(3):
        squared(wrapped, rank).backward()
    assert under_way[1:] == [7, 7]  # all except its own


# -- models -----------------------------------------------------------------------------------------


@ddp
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_dtypes_may_be_mixed(subject, rank, world_size, as_view):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.double_ = nn.Linear(2, 2), nn.Linear(2, 2).double()
            self.brain, self.complex_ = nn.Linear(2, 2).bfloat16(), nn.Parameter(torch.ones(2, dtype=torch.cfloat))

        def forward(self, x):
            y = self.single(x.float()) + self.double_(x.double()) + self.brain(x.bfloat16())
            return (y * self.complex_).abs()

    torch.manual_seed(0)
    model = Mixed()
    alone = copy.deepcopy(model)
    wrapped = subject(model, gradient_as_bucket_view=as_view)
    for _ in range(2):
        model.zero_grad()
        squared(wrapped, rank).backward()
    sum(squared(alone, r) for r in range(world_size)).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert p.grad.dtype == p.dtype
        # bfloat16 has 8 bits; both sides add world_size terms
        tolerance = 0.03 if p.dtype == torch.bfloat16 else 1e-5
        off = (p.grad - q.grad / world_size).abs().max() / q.grad.abs().max()
        assert float(off) < tolerance, name


@pytest.mark.if_subject_takes("reduce_dtype")
@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_may_be_summed_in_float32(subject, rank, dtype):
    """The mean is rounded once, at its end; a third of each term in low precision would be rounded earlier."""
    terms = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = nn.Linear(64, 1, bias=False).to(dtype)
    subject(model, reduce_dtype=torch.float32)(terms[rank : rank + 1]).sum().backward()
    assert model.weight.grad.dtype == dtype
    exact, limits = terms.double().mean(0, keepdim=True), torch.finfo(dtype)
    once = limits.eps / 2 * exact.abs() * 1.001 + limits.tiny  # float32 adds at most a thousandth of that
    assert ((model.weight.grad - exact).abs() <= once).all()


class Gaps(nn.Module):
    """Parameters whose elements do not lie next to each other in memory."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, 4, dtype=torch.float64)[:, ::2])
        self.bias = nn.Parameter(torch.randn(6, dtype=torch.float64)[::2])
        self.register_buffer("scale", torch.randn(6, dtype=torch.float64)[::2])

    def forward(self, x):
        return x @ self.rows * self.scale[:2] + self.bias[:2] * self.bias[2]


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_parameters_with_gaps_in_memory_are_taken_and_reduced(subject, rank, as_view):
    def loss(model, r):
        return model(samples(r).view(-1)[:6].view(2, 3)).square().mean()

    torch.manual_seed(rank)
    model = Gaps()
    wrapped, expected = subject(model, gradient_as_bucket_view=as_view), alike(Gaps)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    loss(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, loss, Gaps))


@ddp
@pytest.mark.world_size(2)
def test_channels_last_gradients_keep_their_strides(subject, rank):
    def make():
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1)).to(memory_format=torch.channels_last)

    def loss(model, r):
        return model(samples(r).view(1, 2, 2, 2)).square().mean()

    model = alike(make)
    wrapped = subject(model, gradient_as_bucket_view=True)
    loss(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, loss, make))
    assert model[0].weight.grad.stride() == model[0].weight.stride()


@ddp
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_unused_parameters_may_change_from_step_to_step(subject, rank, world_size, as_view):
    model = alike(Branches)
    wrapped = subject(model, find_unused_parameters=True, gradient_as_bucket_view=as_view, **fitting(subject, TINY))
    for step in range(4):

        def loss(module, r, step=step):
            return module(samples(r), (r + step) % 3 < 2).square().mean()

        model.zero_grad()
        loss(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(world_size, loss, Branches))  # None if no rank has a gradient


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_parameter_without_gradient_is_an_error_in_the_first_pass_on_every_rank(subject, rank):
    wrapped = subject(alike(Branches), **fitting(subject, TINY))
    for _ in range(2):  # the wrapper still works after the error
        with pytest.raises(RuntimeError, match=r"on rank 0, parameter 'right.weight' and 3 more got no gradient in "):
            (wrapped(samples(rank), left=rank == 0).sum() + 0 * sum_if(wrapped, rank)).backward()


def sum_if(wrapped, rank):
    """Return a term that uses every parameter on rank 1, so that only rank 0 has the fault."""
    return sum(p.sum() for p in wrapped.parameters()) if rank == 1 else 0


@ddp
@pytest.mark.world_size(2)
def test_a_static_graph_may_leave_parameters_unused(subject, rank):
    def loss(module, r):
        return module(samples(r), r == 0).square().mean()

    model = alike(Branches)
    wrapped = subject(model, static_graph=True, gradient_as_bucket_view=True, **fitting(subject, TINY))
    for _ in range(3):
        model.zero_grad()
        loss(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, loss, Branches))


class Recomputed(nn.Module):
    """A body under activation checkpointing, once or twice over the same weights."""

    def __init__(self, reentrant, times):
        super().__init__()
        self.inside, self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.reentrant, self.times = reentrant, times

    def forward(self, x):
        y = self.inside(x).tanh()
        for _ in range(self.times):
            y = checkpoint(lambda x: self.body(x).tanh(), y, use_reentrant=self.reentrant)
        return self.head(y)


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("reentrant", "times", "options"),
    [(False, 1, {}), (False, 2, {}), (True, 1, {}), (True, 2, {"static_graph": True})],
    ids=["once", "twice", "reentrant once", "reentrant twice"],
)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_activation_checkpointing(subject, rank, reentrant, times, options, as_view):
    model = alike(lambda: Recomputed(reentrant, times))
    wrapped = subject(model, gradient_as_bucket_view=as_view, **fitting(subject, TINY), **options)
    for _ in range(3):
        model.zero_grad()
        squared(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, squared, lambda: Recomputed(False, times)))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("sizes", [TINY, {}], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("unused", [0, 2])
def test_reentrant_checkpoints_over_the_same_weights_are_refused_without_a_static_graph(
    subject, rank, sizes, unused, find_unused
):
    def make():
        model = Recomputed(True, 2)
        model.never = nn.ModuleList(nn.Linear(2, 2) for _ in range(unused))  # so many are unused
        return model

    model = alike(make)
    wrapped = subject(model, find_unused_parameters=find_unused, **fitting(subject, sizes))
    with pytest.raises(RuntimeError, match=r"on every rank, parameter 'body.\w+' got a gradient after it was taken"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_hooks_that_come_after_wrapping_change_what_is_reduced(subject, rank, register, steps, as_view):
    """The model has a large parameter, whose gradient is taken at once, and small ones."""

    def seven(param):
        param.grad.fill_(7.0 * (rank + 1))

    hook = seven if "post" in register else lambda grad: torch.full_like(grad, 7.0 * (rank + 1))
    model = alike(lambda: nn.Sequential(nn.Linear(2, 200), nn.Linear(200, 200), nn.Linear(200, 1)))
    wrapped = subject(model, gradient_as_bucket_view=as_view)
    for _ in range(steps):
        squared(wrapped, rank).backward()
    loss = squared(wrapped, rank)
    for p in model.parameters():
        getattr(p, register)(hook)
    for _ in range(2):
        model.zero_grad()
        loss.backward()
        assert {p.grad.unique().item() for p in model.parameters()} == {10.5}
        loss = squared(wrapped, rank)


@pytest.mark.beyond_contract("gradients that a hook takes away")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_gradients_that_a_hook_has_taken_away_are_not_missed(subject, rank, as_view):
    """An optimizer does this if it steps during backward and drops each gradient."""
    model = alike(lambda: nn.Sequential(nn.Linear(2, 200), nn.Linear(200, 200), nn.Linear(200, 1)))
    for p in model[1].parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    wrapped = subject(model, gradient_as_bucket_view=as_view)
    for _ in range(3):
        model.zero_grad()
        goal = mean_gradients(2, squared, lambda: copy.deepcopy(model))
        squared(wrapped, rank).backward()
        require_close(gradients(model), goal | {"1.weight": None, "1.bias": None})


@dataclasses.dataclass
class Result:
    values: list
    extra: object = None


class Custom:
    def __init__(self, hidden):
        self.hidden = hidden


@pytest.mark.beyond_contract("outputs of any type")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "pack",
    [
        lambda y: {"a": [(y,)]},
        lambda y: Result([y]),
        lambda y: Custom(y),
        lambda y: Result([], Custom({"y": y})),
        lambda y: (2 * y, Custom(y)),
    ],
    ids=["dict", "dataclass", "object", "nested", "object beside a tensor"],
)
def test_the_gradient_of_any_output_is_synchronised(subject, rank, pack):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            self.kept = self.net(x)
            return pack(self.kept)

    model = alike(Packed)
    wrapped = subject(model, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad()
        wrapped(samples(rank))
        model.kept.square().mean().backward()
    expected = mean_gradients(2, squared)
    require_close(gradients(model.net), expected)


@ddp
@pytest.mark.world_size(2)
def test_a_module_that_keeps_its_output_to_itself(subject, rank):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            self.kept = self.net(x)

    model = alike(Keeps)
    wrapped = subject(model)
    for _ in range(3):
        model.zero_grad()
        wrapped(samples(rank))
        model.kept.square().mean().backward()
        require_close(gradients(model.net), mean_gradients(2, squared))


class Looked(nn.Module):
    """A table with a lookup by function, which can make sparse gradients."""

    def __init__(self, rows, sparse=False):
        super().__init__()
        self.table, self.head, self.sparse = nn.Parameter(torch.ones(rows, 2)), nn.Linear(2, 1), sparse

    def forward(self, x):
        rows = torch.arange(len(x)) % 3
        return self.head(nn.functional.embedding(rows, self.table, sparse=self.sparse) * x)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("where", [[1], [0, 1]], ids=["on rank 1", "on every rank"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("rows", [5, 20000], ids=["small", "large"])
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": torch.float32}, TINY], ids=["", "float32", "a bucket each"])
def test_a_sparse_gradient_is_named_on_every_rank(subject, rank, where, steps, rows, options):
    model = alike(lambda: Looked(rows))
    if "reduce_dtype" in options:
        model.table.data = model.table.data.bfloat16()
        model.head.double()
    wrapped = subject(model, **options)
    for _ in range(steps):
        squared(wrapped, rank).backward()
    model.zero_grad()
    model.sparse = rank in where
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=rf": on {ranks}, the gradient of 'table' has layout torch.sparse_coo"):
        squared(wrapped, rank).backward()
    model.zero_grad()
    model.sparse = False
    squared(wrapped, rank).backward()
    goal = mean_gradients(2, squared, lambda: copy.deepcopy(model))
    if model.table.dtype == torch.float64:
        require_close(gradients(model), goal)
    else:
        torch.testing.assert_close(gradients(model), goal, rtol=0.01, atol=0.01, check_dtype=False)
