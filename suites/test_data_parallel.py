"""Our DistributedDataParallel keeps what it promises, in the corners where others have failed."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pdlcheck.checks import check_data_parallel, check_same_trajectory

ddp = pytest.mark.verifies("DistributedDataParallel")
TINY = {"bucket_cap_mb": 1e-5, "first_bucket_mb": 1e-5}  # a bucket for each parameter, but single numbers


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def alike(make=net):
    """The same model on every rank."""
    torch.manual_seed(0)
    return make().double()


def samples(rank, n=4):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def mean_gradients(world_size, loss, make=net):
    """Of one process: the mean over ranks of the gradient of ``loss(model, rank)``, zero where a rank has none."""
    model = alike(make)
    sum(loss(model, rank) for rank in range(world_size)).backward()
    return {n: None if p.grad is None else p.grad / world_size for n, p in model.named_parameters()}


def require_close(found, expected):
    assert found.keys() == expected.keys()
    for name, goal in expected.items():
        assert (found[name] is None) == (goal is None), name
        if goal is not None:
            torch.testing.assert_close(found[name], goal, rtol=1e-12, atol=1e-12, msg=name)


def squared(model, rank):
    return model(samples(rank)).square().mean()


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
        return subject(module, bucket_cap_mb=cap, first_bucket_mb=cap, gradient_as_bucket_view=as_view, **options)

    # a static graph does not allow that accumulation comes and goes
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
    """The first layers of this one are ready first."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        return self.first(self.second(self.third(x)).tanh()).tanh()


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
        wrapped = subject(model, **TINY)
        for _ in range(2):
            squared(wrapped, rank).backward()
        names = {id(p): n for n, p in model.named_parameters()}
        order = [names[id(p)].split(".")[0] for b in wrapped._reducer.buckets for p in b.params]
        assert list(dict.fromkeys(order))[: len(expected)] == expected
        everyone = [None, None]
        dist.all_gather_object(everyone, order)
        assert everyone[0] == everyone[1]


@ddp
@pytest.mark.world_size(2)
def test_reduction_begins_while_backward_is_under_way(subject, rank):
    """When the gradient of the first layer is computed, those of the others are on their way."""
    model = alike(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    wrapped = subject(model, **TINY)
    under_way = []
    model[0].weight.register_hook(
        lambda grad: under_way.append(sum(b.pending is not None for b in wrapped._reducer.buckets))
    )
    for _ in range(3):
        squared(wrapped, rank).backward()
    assert under_way[1:] == [7, 7]  # all but its own


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
        # bfloat16 has 8 bits, and is added world_size times here and there
        tolerance = 0.03 if p.dtype == torch.bfloat16 else 1e-5
        off = (p.grad - q.grad / world_size).abs().max() / q.grad.abs().max()
        assert float(off) < tolerance, name


@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_may_be_summed_in_float32(subject, rank, dtype):
    """The mean is rounded once, at its end; a third of each term in low precision would be rounded before."""
    terms = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = nn.Linear(64, 1, bias=False).to(dtype)
    subject(model, reduce_dtype=torch.float32)(terms[rank : rank + 1]).sum().backward()
    assert model.weight.grad.dtype == dtype
    exact, limits = terms.double().mean(0, keepdim=True), torch.finfo(dtype)
    once = limits.eps / 2 * exact.abs() * 1.001 + limits.tiny  # float32 adds a thousandth of that at most
    assert ((model.weight.grad - exact).abs() <= once).all()


@ddp
@pytest.mark.world_size(2)
def test_channels_last_gradients_keep_their_strides(subject, rank):
    def make():
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1)).to(memory_format=torch.channels_last)

    def loss(model, r):
        return model(samples(r).view(1, 2, 2, 2)).square().mean()

    model = alike(make)
    loss(subject(model, gradient_as_bucket_view=True), rank).backward()
    require_close(gradients(model), mean_gradients(2, loss, make))
    assert model[0].weight.grad.stride() == model[0].weight.stride()


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.left, self.right, self.never = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x, left):
        y = torch.tanh(self.shared(x))
        return self.left(y) if left else self.right(y)


@ddp
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_unused_parameters_may_change_from_step_to_step(subject, rank, world_size, as_view):
    model = alike(Branches)
    wrapped = subject(model, find_unused_parameters=True, gradient_as_bucket_view=as_view, **TINY)
    for step in range(4):

        def loss(module, r, step=step):
            return module(samples(r), (r + step) % 3 < 2).square().mean()

        model.zero_grad()
        loss(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(world_size, loss, Branches))  # None where nobody has one


@ddp
@pytest.mark.world_size(2)
def test_a_parameter_without_gradient_is_an_error_in_the_first_pass_on_every_rank(subject, rank):
    wrapped = subject(alike(Branches), **TINY)
    for _ in range(2):  # and the wrapper goes on
        with pytest.raises(RuntimeError, match=r"on rank 0, parameter 'right.weight' and 3 more got no gradient in "):
            (wrapped(samples(rank), left=rank == 0).sum() + 0 * sum_if(wrapped, rank)).backward()


def sum_if(wrapped, rank):
    """Everything is used on rank 1, so that only rank 0 sees the fault."""
    return sum(p.sum() for p in wrapped.parameters()) if rank == 1 else 0


@ddp
@pytest.mark.world_size(2)
def test_a_static_graph_may_leave_parameters_unused(subject, rank):
    def loss(module, r):
        return module(samples(r), r == 0).square().mean()

    model = alike(Branches)
    wrapped = subject(model, static_graph=True, gradient_as_bucket_view=True, **TINY)
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
    wrapped = subject(model, gradient_as_bucket_view=as_view, **TINY, **options)
    for _ in range(3):
        model.zero_grad()
        squared(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, squared, lambda: Recomputed(False, times)))


@ddp
@pytest.mark.world_size(2)
def test_reentrant_checkpoints_over_the_same_weights_are_refused_without_a_static_graph(subject, rank):
    model = alike(lambda: Recomputed(True, 2))
    wrapped = subject(model, **TINY)
    with pytest.raises(RuntimeError, match=r"on every rank, parameter 'body.\w+' got a gradient after it was taken"):
        squared(wrapped, rank).backward()


@dataclasses.dataclass
class Result:
    values: list
    extra: object = None


class Custom:
    def __init__(self, hidden):
        self.hidden = hidden


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


# -- passes -----------------------------------------------------------------------------------------


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_two_backward_passes_of_one_step_add_up(subject, rank, as_view):
    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=as_view, **TINY)
    for _ in range(2):
        model.zero_grad()
        loss = squared(wrapped, rank)
        loss.backward(retain_graph=True)
        loss.backward()
        squared(wrapped, rank + 2).backward()
    expected = mean_gradients(2, lambda m, r: 2 * squared(m, r) + squared(m, r + 2))
    require_close(gradients(model), expected)


@ddp
@pytest.mark.world_size(2)
def test_two_wrappers_may_share_a_backward_pass(subject, rank):
    def loss(first, second, r):
        return second(first(samples(r)).tanh()).square().mean() + squared(first, r + 3)

    def make():
        return nn.ModuleList([nn.Linear(2, 2), net()])

    model = alike(make)
    wrapped = [subject(part, gradient_as_bucket_view=True, **TINY) for part in model]
    for _ in range(3):
        model.zero_grad()
        loss(*wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, lambda m, r: loss(*m, r), make))


@ddp
@pytest.mark.world_size(2)
def test_batch_norm_may_run_twice_before_backward(subject, rank):
    def make():
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def loss(model, r):
        return squared(model, r) * squared(model, r + 5)

    model = alike(make)
    wrapped = subject(model)
    loss(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, loss, make))


@ddp
@pytest.mark.world_size(2)
def test_no_sync_is_decided_by_the_forward_pass(subject, rank):
    model = alike()
    wrapped = subject(model)
    own = torch.autograd.grad(squared(model, rank), model[0].weight)[0]
    with wrapped.no_sync():
        loss = squared(wrapped, rank)
    loss.backward()
    torch.testing.assert_close(model[0].weight.grad, own)
    model.zero_grad()
    synced = squared(wrapped, rank)
    with wrapped.no_sync():
        local = squared(wrapped, rank)
        local.backward()  # though the forward pass of the other is still to be synchronised
        torch.testing.assert_close(model[0].weight.grad, own)
        synced.backward()
    require_close(gradients(model), mean_gradients(2, lambda m, r: 2 * squared(m, r)))


@ddp
@pytest.mark.world_size(2)
def test_a_step_is_reduced_once_however_many_micro_batches_it_has(subject, rank):
    model = alike()
    wrapped = subject(model)
    calls = []

    def counting(state, bucket):
        calls.append(bucket.index())
        return plain_hook(state, bucket)

    wrapped.register_comm_hook(None, counting)
    for micro in range(6):
        with nullcontext() if micro % 3 == 2 else wrapped.no_sync():
            squared(wrapped, rank).backward()
    assert len(calls) == 2


@ddp
@pytest.mark.world_size(2)
def test_forward_without_gradient_does_not_communicate_gradients(subject, rank):
    model = alike()
    wrapped = subject(model)
    with torch.no_grad():
        out = wrapped(samples(0))
    assert not out.requires_grad
    wrapped.eval()
    assert not model.training
    assert torch.equal(wrapped(samples(0)), out)  # no backward pass follows
    wrapped.train()
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


@ddp
@pytest.mark.world_size(2)
def test_a_gradient_penalty_uses_autograd_grad_without_communication(subject, rank):
    def loss(model, r):
        x = samples(r).requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return (slope.norm(dim=1) - 1).square().mean()

    def penalised(model, r):
        return loss(model, r) + squared(model, r)

    model = alike()
    wrapped = subject(model)
    for _ in range(2):
        model.zero_grad()
        penalised(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, penalised))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle of a backward pass")


@ddp
@pytest.mark.world_size(2)
def test_the_pass_after_one_that_raised_is_synchronised(subject, rank):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.fails = nn.Linear(2, 2), nn.Linear(2, 1), False

        def forward(self, x):
            y = self.a(x).tanh()
            return self.b(Fails.apply(y) if self.fails else y)

    model = alike(Fragile)
    wrapped = subject(model, **TINY)
    for fails in (False, True, False, True, True, False):
        model.zero_grad()
        model.fails = fails
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            squared(wrapped, rank).backward()
        if not fails:
            require_close(gradients(model), mean_gradients(2, squared, Fragile))


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("to_none", [True, False])
def test_views_of_the_bucket_survive_zero_grad(subject, rank, to_none):
    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=True)
    for step in range(4):
        model.zero_grad(set_to_none=to_none)
        squared(wrapped, rank + step).backward()
        require_close(gradients(model), mean_gradients(2, lambda m, r, step=step: squared(m, r + step)))
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1
    assert [b.whole.untyped_storage().data_ptr() for b in wrapped._reducer.buckets] == [*storages]


# -- uneven inputs ----------------------------------------------------------------------------------


@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("by_all", [True, False], ids=["initial world size", "active ranks"])
@pytest.mark.parametrize("batches", [(1, 2, 3), (3, 0, 1), (0, 2, 2)], ids=str)
def test_ranks_may_run_out_of_inputs(subject, rank, world_size, by_all, batches):
    def make():
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))

    model = alike(make)
    wrapped = subject(model, **TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with wrapped.join(divide_by_initial_world_size=by_all):
        for step in range(batches[rank]):
            optimizer.zero_grad()
            squared(wrapped, rank + 10 * step).backward()
            optimizer.step()
    alone = alike(make)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(batches)):
        active = [r for r in range(world_size) if batches[r] > step]
        reference.zero_grad()
        (sum(squared(alone, r + 10 * step) for r in active) / (world_size if by_all else len(active))).backward()
        reference.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@ddp
@pytest.mark.world_size(2)
def test_join_goes_with_accumulation_unused_parameters_and_buffers(subject, rank):
    class Counted(Branches):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x, left):
            self.seen += 1
            return super().forward(x, left)

    model = alike(Counted)
    wrapped = subject(model, find_unused_parameters=True, gradient_as_bucket_view=True, **TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(4 if rank == 0 else 1):
            with wrapped.no_sync() if step % 2 else nullcontext():
                wrapped(samples(step), left=step < 2).square().mean().backward()
            with torch.no_grad():
                wrapped(samples(step), left=True)
            optimizer.step()
            optimizer.zero_grad()
    everyone = [None, None]
    dist.all_gather_object(everyone, [t.tolist() for t in model.state_dict().values()])
    assert everyone[0] == everyone[1]


@ddp
@pytest.mark.world_size(2)
def test_join_throws_on_early_termination_where_it_is_asked_to(subject, rank):
    wrapped = subject(alike())
    with pytest.raises(RuntimeError, match="exhausted"), wrapped.join(throw_on_early_termination=True):
        for _ in range(1 + rank):
            squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own optimizer uses what torch has deprecated
def test_join_with_a_sharded_optimizer_beside_it(subject, rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def train(wrap):
        model = alike()
        wrapped = wrap(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([wrapped, optimizer]):
            for step in range(1 + 2 * rank):
                optimizer.zero_grad()
                squared(wrapped, rank + step).backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(train(subject), train(TorchDistributedDataParallel), rtol=1e-12, atol=1e-12)


@ddp
@pytest.mark.world_size(2)
def test_a_graph_outlives_its_wrapper(subject, rank):
    model = alike()
    loss = squared(subject(model), rank)
    gc.collect()
    loss.backward()
    require_close(gradients(model), mean_gradients(2, squared))


# -- communication hooks ----------------------------------------------------------------------------


def plain_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@ddp
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_torchs_hooks_run_unchanged(subject, rank, world_size, name, as_view):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=as_view, **TINY)
    wrapped.register_comm_hook(None, getattr(default_hooks, name))
    bits = {"fp16_compress_hook": 10, "bf16_compress_hook": 7}.get(name, 45)
    for _ in range(3):
        model.zero_grad()
        squared(wrapped, rank).backward()
        for key, goal in mean_gradients(world_size, squared).items():
            # each term is rounded once, and each addition once more
            atol = 2 * world_size * 2.0**-bits * float(goal.abs().max())
            torch.testing.assert_close(gradients(model)[key], goal, rtol=0, atol=max(atol, 1e-12))


@ddp
@pytest.mark.world_size(2)
def test_powersgd_on_one_bucket_is_as_with_torchs(subject, rank):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    def run(cls):
        model = alike(lambda: nn.Sequential(nn.Linear(2, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 1)))
        wrapped = cls(model)
        state = hooks.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=3)
        wrapped.register_comm_hook(state, hooks.powerSGD_hook)
        for step in range(5):
            model.zero_grad()
            squared(wrapped, rank + step).backward()
        assert state.total_numel_after_compression < state.total_numel_before_compression
        return gradients(model)

    require_close(run(subject), run(TorchDistributedDataParallel))


@ddp
@pytest.mark.world_size(2)
def test_a_hook_sees_what_torchs_bucket_shows(subject, rank):
    def run(cls, **options):
        model = alike()
        wrapped = cls(model, **options)
        names = {id(p): n for n, p in model.named_parameters()}
        seen = []

        def hook(state, bucket):
            assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
            assert bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients())
            assert torch.equal(bucket.buffer(), torch.cat([g.flatten() for g in bucket.gradients()]))
            bucket.set_buffer(bucket.buffer() * 1)
            seen.append((bucket.index(), bucket.is_last(), sorted(names[id(p)] for p in bucket.parameters())))
            return plain_hook(state, bucket)

        wrapped.register_comm_hook(None, hook)
        for step in range(3):
            model.zero_grad()
            squared(wrapped, rank).backward()
            if step == 0:
                seen.clear()
        require_close(gradients(model), mean_gradients(2, squared))
        return seen

    everything = [name for name, _ in net().named_parameters()]
    assert run(subject) == run(TorchDistributedDataParallel) == 2 * [(0, True, sorted(everything))]
    assert [one[:2] for one in run(subject, **TINY)] == 2 * [(0, False), (1, False), (2, True)]


@ddp
@pytest.mark.world_size(2)
def test_a_hook_is_registered_once_and_is_a_function(subject):
    wrapped = subject(alike())
    with pytest.raises(TypeError, match="register_comm_hook takes a function, got int"):
        wrapped.register_comm_hook(None, 1)
    wrapped.register_comm_hook(None, plain_hook)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        wrapped.register_comm_hook(None, plain_hook)


# -- the module inside, and changes to it -----------------------------------------------------------


@ddp
@pytest.mark.world_size(2)
def test_the_state_dict_has_the_prefix_of_torchs(subject):
    model = alike(Branches)
    ours, torchs = subject(model), TorchDistributedDataParallel(copy.deepcopy(model))
    assert ours.module is model
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict())
    model.load_state_dict({name.removeprefix("module."): value for name, value in ours.state_dict().items()})


@ddp
@pytest.mark.world_size(2)
def test_a_copy_is_a_wrapper_of_its_own_and_pickling_is_refused(subject, rank):
    wrapped = subject(alike(), gradient_as_bucket_view=True)
    squared(wrapped, rank).backward()
    before = gradients(wrapped.module)
    other = copy.deepcopy(wrapped)
    other.zero_grad()
    squared(other, rank + 2).backward()
    require_close(gradients(other.module), mean_gradients(2, lambda m, r: squared(m, r + 2)))
    require_close(gradients(wrapped.module), before)
    with pytest.raises(TypeError, match=r"holds a process group, which cannot be pickled; save .module or its state"):
        pickle.dumps(wrapped)
    wrapped.register_comm_hook(None, plain_hook)
    with pytest.raises(TypeError, match=r"state that cannot be copied; copy its .module"):
        copy.deepcopy(wrapped)


@ddp
@pytest.mark.world_size(2)
def test_a_module_may_be_wrapped_anew(subject, rank):
    model = alike()

    def wrap_and_step():  # in a frame of its own, as who watches may keep what its variables held
        model.zero_grad()
        wrapped = subject(model)
        squared(wrapped, rank).backward()
        require_close(gradients(model), mean_gradients(2, squared))
        return len(model[0].weight._post_accumulate_grad_hooks)

    assert [wrap_and_step() for _ in range(3)] == [1, 1, 1]
    gc.collect()
    assert not model[0].weight._post_accumulate_grad_hooks


def replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


CHANGES = {
    "added": (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))), "'extra' was added"),
    "a layer added": (lambda m: m.append(nn.Linear(1, 1).double()), "'3.weight' was added"),
    "replaced": (replace, "'0.weight' was replaced by another one"),
    "frozen": (lambda m: m[2].requires_grad_(False), "'2.weight' was frozen"),
    "unfrozen": (lambda m: m[2].bias.requires_grad_(True), "'2.bias' was unfrozen"),
    "cast": (lambda m: setattr(m[0].bias, "data", m[0].bias.data.float()), "'0.bias' was cast from torch.float64"),
    "resized": (lambda m: setattr(m[2].bias, "data", torch.zeros(1, 1).double()), r"'2.bias' was resized from \(1,\)"),
}


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("where", "find_unused"), [([0, 1], False), ([1], True)], ids=["everywhere", "on rank 1, unused ones found"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_wrapping_is_named_on_every_rank(subject, rank, change, where, find_unused):
    model = alike()
    model[2].bias.requires_grad_(change != "unfrozen")
    wrapped = subject(model, find_unused_parameters=find_unused, **TINY)
    squared(wrapped, rank).backward()
    model.zero_grad()
    change_it, named = CHANGES[change]
    if rank in where:
        change_it(model)
    if change == "cast":  # a model of two dtypes cannot run: what it computes does not matter here
        model[0].forward = lambda x: nn.functional.linear(x, model[0].weight, model[0].bias.double())
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f"^DistributedDataParallel: on {ranks}, parameter {named}.*; wrap"):
        squared(wrapped, rank).backward()


@ddp
@pytest.mark.world_size(2)
def test_casting_the_whole_model_after_wrapping_is_seen(subject, rank):
    wrapped = subject(alike())
    wrapped.float()
    with pytest.raises(RuntimeError, match=r"'0.weight' was cast from torch.float64 to torch.float32 after wrapping"):
        wrapped(samples(rank).float()).sum().backward()


@ddp
@pytest.mark.world_size(2)
def test_a_buffer_of_another_shape_is_seen(subject):
    model = alike(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    wrapped = subject(model)
    model[1].running_mean = torch.zeros(3).double()
    with pytest.raises(RuntimeError, match=r"buffer '1.running_mean' was torch.float64 \(2,\), it is .* \(3,\) now"):
        wrapped(samples(0))


@ddp
@pytest.mark.world_size(2)
def test_new_values_are_no_change(subject, rank):
    model = alike()
    wrapped = subject(model)
    for p in model.parameters():
        p.data = p.data.clone()
    squared(wrapped, rank).backward()
    require_close(gradients(model), mean_gradients(2, squared))


@ddp
@pytest.mark.world_size(2)
def test_what_the_module_says_is_to_be_ignored_is_left_alone(subject, rank):
    model = alike()
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]
    with torch.no_grad():
        model[2].bias.fill_(rank)
    wrapped = subject(model)
    assert model[2].bias.item() == rank
    wrapped(samples(0) * (rank + 1)).mean().backward()
    assert model[2].bias.grad.item() == 1
    everyone = [None, None]
    dist.all_gather_object(everyone, model[0].weight.grad.tolist())
    assert everyone[0] == everyone[1]


# -- construction -----------------------------------------------------------------------------------


@ddp
@pytest.mark.world_size(2, 3)
def test_everything_starts_as_on_rank_0(subject, rank):
    class Everything(nn.Module):
        def __init__(self):
            super().__init__()
            self.half, self.norm = nn.Linear(2, 2).half(), nn.BatchNorm1d(3)
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.register_buffer("mask", torch.rand(5) < 0.5)
            self.register_buffer("short", torch.randint(0, 9, (3,), dtype=torch.int16))
            self.register_buffer("angles", torch.randn(2, 2, dtype=torch.cfloat), persistent=False)
            self.register_buffer("nothing", None)
            self.register_buffer("empty", torch.ones(0))
            self.register_buffer("turned", torch.randn(2, 3).T)

    torch.manual_seed(rank)
    model = Everything()
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.detach().tolist() for t in tensors]
    subject(model)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, before)
    assert [t.detach().tolist() for t in tensors] == everyone[0]


@ddp
@pytest.mark.world_size(4)
def test_groups_are_independent(subject, rank):
    groups = [dist.new_group([2 * half, 2 * half + 1]) for half in range(2)]
    torch.manual_seed(rank)
    model = net().double()
    wrapped = subject(model, process_group=groups[rank // 2])
    squared(wrapped, rank).backward()
    everyone = [None] * 4
    dist.all_gather_object(everyone, [model[0].weight.tolist(), model[0].weight.grad.tolist()])
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3] and everyone[0] != everyone[2]


@ddp
@pytest.mark.world_size(1)
def test_a_world_of_one(subject):
    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=True)
    squared(wrapped, 0).backward()
    require_close(gradients(model), mean_gradients(1, squared))


def other_shape(rank):
    return nn.Linear(2, 3 if rank else 2)


def other_dtype(rank):
    return nn.Linear(2, 2).to(torch.float64 if rank else torch.float32)


def other_order(rank):
    parts = [("a", nn.Linear(2, 2)), ("b", nn.Linear(2, 2))]
    return nn.ModuleDict(parts[::-1] if rank else parts)


def other_strides(rank):
    return nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last if rank else torch.contiguous_format)


def other_frozen(rank):
    return nn.Linear(2, 2).requires_grad_(not rank) if rank else nn.Linear(2, 2)


def half_frozen(rank):
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(not rank)
    return model


def more_layers(rank):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank)))


def other_buffer(rank):
    return nn.BatchNorm1d(2, track_running_stats=not rank)


def lazy(rank):
    return nn.LazyLinear(2) if rank else nn.Linear(2, 2)


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_shape, r"tensor 0 is 'weight' torch.float32 \(2, 2\) .* on rank 0, 'weight' torch.float32 \(3, 2\)"),
        (other_dtype, r"tensor 0 is 'weight' torch.float32 \(2, 2\) .* 'weight' torch.float64 \(2, 2\) .* on rank 1"),
        (other_order, r"tensor 0 is 'a.weight' .* on rank 0, 'b.weight' .* on rank 1; make it in the same way"),
        (other_strides, r"'weight' torch.float32 \(2, 2, 2, 2\) .* with strides .* on rank 1"),
        (half_frozen, r"that requires a gradient on rank 0, 'weight' torch.float32 \(2, 2\) on cpu on rank 1"),
        (more_layers, r"tensor 2 is nothing on rank 0, '1.weight' .* on rank 1"),
        (other_buffer, r"tensor 2 is 'running_mean' .* on rank 0, nothing on rank 1"),
        (lazy, r"on rank 1, got 'weight', which has no shape yet; run one forward pass first"),
        (other_frozen, r"on rank 1, Linear has no parameter that requires a gradient; use it as it is"),
        (lambda rank: nn.ReLU(), r"on every rank, ReLU has no parameter that requires a gradient"),
        (lambda rank: nn.Embedding(2, 2, sparse=True), r"on every rank, embedding '' makes sparse gradients"),
        (lambda rank: nn.Linear(2, 2, device="meta"), r"on every rank, got 'weight' on device meta"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_do_not_fit_are_refused_alike_on_every_rank(subject, rank, make, message):
    with pytest.raises(ValueError, match=rf"^DistributedDataParallel\b.*{message}") as caught:
        subject(make(rank))
    everyone = [None, None]
    dist.all_gather_object(everyone, str(caught.value))
    assert everyone[0] == everyone[1]


@ddp
@pytest.mark.world_size(2)
def test_options_that_differ_are_refused(subject, rank):
    with pytest.raises(ValueError, match=r"got bucket_cap_mb=1 on rank 0 and bucket_cap_mb=2 on rank 1; pass the same"):
        subject(net(), bucket_cap_mb=1 + rank)


@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": 0}, "needs a positive bucket_cap_mb, got bucket_cap_mb=0"),
        ({"first_bucket_mb": -1}, "needs a positive first_bucket_mb, got first_bucket_mb=-1"),
        ({"device_ids": [0, 1]}, r"serves one device in a process, got device_ids=\[0, 1\]; start more ranks"),
        ({"reduce_dtype": torch.int32}, "sums in a floating dtype, got reduce_dtype=torch.int32"),
        (
            {"reduce_dtype": torch.float32, "gradient_as_bucket_view": True},
            "the gradient of 'weight', torch.bfloat16, cannot be a view of a bucket of torch.float32",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_refused(subject, options, message):
    with pytest.raises(ValueError, match=f"DistributedDataParallel.* {message}"):
        subject(nn.Linear(2, 2).bfloat16(), **options)


@ddp
@pytest.mark.world_size(2)
def test_only_modules_are_wrapped(subject):
    with pytest.raises(TypeError, match=r"DistributedDataParallel takes a torch.nn.Module, got function"):
        subject(net)


def test_there_must_be_a_process_group():
    from pdlcheck.primitives import DistributedDataParallel

    with pytest.raises(ValueError, match="DistributedDataParallel needs a process group"):
        DistributedDataParallel(net())


@ddp
@pytest.mark.gpu
@pytest.mark.world_size(1)
def test_it_trains_on_a_gpu(subject):
    if dist.get_backend() != "nccl":
        pytest.skip("needs ranks on nccl; run it with --world nccl")
    torch.manual_seed(0)
    model = net().cuda()
    alone = copy.deepcopy(model)
    wrapped = subject(model, [0], gradient_as_bucket_view=True, **TINY)
    for _ in range(3):
        model.zero_grad()
        squared_on_gpu = wrapped(samples(0).float()).square().mean()
        squared_on_gpu.backward()
    alone(samples(0).float().cuda()).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
