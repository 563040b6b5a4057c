"""Passes of DistributedDataParallel: accumulation, several backward passes, errors in one, uneven inputs."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from .models import (
    TINY,
    Branches,
    alike,
    ddp,
    fitting,
    gradients,
    mean_gradients,
    net,
    plain_hook,
    require_close,
    samples,
    squared,
)

# -- passes -----------------------------------------------------------------------------------------


@pytest.mark.beyond_contract("several backward passes of one step")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_two_backward_passes_of_one_step_add_up(subject, rank, as_view):
    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=as_view, **fitting(subject, TINY))
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
    wrapped = [subject(part, gradient_as_bucket_view=True, **fitting(subject, TINY)) for part in model]
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


class Squeezed(nn.Linear):
    """A layer that returns a view; an in-place operation cuts the view off from its graph."""

    def forward(self, x):
        return super().forward(x).squeeze(-1)


class Remembers(nn.Linear):
    """A layer that also keeps a tensor that it does not return."""

    def forward(self, x):
        self.activation = super().forward(x)
        return self.activation.square()


def of_a_view_written_in_place(called, module, r):
    out = called(samples(r))
    out *= 2
    out[0] = 0
    return out.square().sum()


def of_an_activation_that_was_kept(called, module, r):
    called(samples(r))
    return module.activation.tanh().sum()


def of_the_gradient_of_the_inputs(called, module, r):
    inputs = samples(r).requires_grad_()
    (slope,) = torch.autograd.grad(called(inputs).sum(), inputs, create_graph=True)
    return slope.square().sum()


ODD_LOSSES = {
    of_a_view_written_in_place: lambda: Squeezed(2, 1),
    of_an_activation_that_was_kept: lambda: Remembers(2, 1),
    of_the_gradient_of_the_inputs: lambda: nn.Sequential(
        nn.Linear(2, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False)
    ),
}


@pytest.mark.beyond_contract("losses of what the module kept")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("loss", ODD_LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_that_does_not_come_by_the_outputs_is_synchronised(subject, rank, loss):
    model = alike(ODD_LOSSES[loss])
    wrapped = subject(model, **fitting(subject, TINY))
    for _ in range(3):
        model.zero_grad()
        loss(wrapped, model, rank).backward()
        require_close(gradients(model), mean_gradients(2, lambda m, r: loss(m, m, r), ODD_LOSSES[loss]))
        model.zero_grad()
        loss(model, model, rank).backward()
        own = gradients(model)
        model.zero_grad()
        with wrapped.no_sync():
            loss(wrapped, model, rank).backward()
        require_close(gradients(model), own)


@pytest.mark.beyond_contract("no_sync as the forward pass had it")
@ddp
@pytest.mark.world_size(2)
def test_no_sync_holds_for_its_outputs_whatever_forward_pass_is_in_between(subject, rank):
    model = alike()
    wrapped = subject(model, **fitting(subject, TINY))
    squared(model, rank).backward()
    own = gradients(model)
    for _ in range(3):
        model.zero_grad()
        with wrapped.no_sync():
            not_synchronised = squared(wrapped, rank)
        synchronised = squared(wrapped, rank + 3)
        not_synchronised.backward()
        require_close(gradients(model), own)
        synchronised.backward()
        require_close(gradients(model), mean_gradients(2, lambda m, r: squared(m, r) + squared(m, r + 3)))


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_pass_that_comes_to_few_parameters_and_no_output_is_an_error(subject, rank):
    model = alike()
    wrapped = subject(model)
    squared(wrapped, rank).backward()  # from here on the wrapper examines only a few parameters during a pass
    wrapped(samples(rank))
    model[2].weight.norm().backward()
    with pytest.raises(RuntimeError, match=r"gave '2.weight' a gradient, and was not sync.* nor come to '2.bias'"):
        wrapped(samples(rank))
    squared(wrapped, rank).backward()


@pytest.mark.beyond_contract("no_sync as the forward pass had it")
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
        local.backward()  # although the other forward pass must still be synchronised
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


class Marked(nn.Linear):
    """A layer that records the buffer of each forward pass, and then writes its own rank into it."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("mark", torch.zeros(()))
        self.seen = []

    def forward(self, x):
        self.seen.append(self.mark.item())
        self.mark.fill_(dist.get_rank() + 1)
        return super().forward(x)


def buffers_seen(wrap, rank):
    wrapped = wrap(alike(Marked))
    squared(wrapped, rank).backward()
    with torch.no_grad():
        for _ in range(2 + rank):
            wrapped(samples(rank))
    for _ in range(2):
        with wrapped.no_sync():
            squared(wrapped, rank).backward()
        squared(wrapped, rank).backward()
    return wrapped.module.seen


@ddp
@pytest.mark.world_size(2)
def test_ranks_may_evaluate_different_numbers_of_batches(subject, rank):
    """Buffers are broadcast in the first pass after a synchronised one and in no other, as with torch's."""
    seen = buffers_seen(subject, rank)
    assert seen == buffers_seen(TorchDistributedDataParallel, rank)
    assert seen == [0, 1, *[rank + 1] * (1 + rank), *[rank + 1] * 2, 1, rank + 1]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle of a backward pass")


@pytest.mark.beyond_contract("error messages")
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
    wrapped = subject(model, **fitting(subject, TINY))
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


@pytest.mark.beyond_contract("attributes of its own")
@ddp
@pytest.mark.world_size(2)
def test_gradients_are_views_of_the_buckets(subject, rank):
    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=True)
    for step in range(4):
        model.zero_grad()
        squared(wrapped, rank + step).backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
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
    wrapped = subject(model, **fitting(subject, TINY))
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


@pytest.mark.beyond_contract("join beside unused parameters")
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
    wrapped = subject(model, find_unused_parameters=True, gradient_as_bucket_view=True, **fitting(subject, TINY))
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
@pytest.mark.world_size(3)
@pytest.mark.parametrize("batches", [(2, 4, 3), (1, 0, 1), (4, 1, 1)], ids=str)
def test_ranks_without_inputs_leave_their_buffers_to_the_last_that_has_some(subject, rank, batches):
    def seen(wrap):
        wrapped = wrap(alike(Marked))
        with wrapped.join():
            for _ in range(batches[rank]):
                squared(wrapped, rank).backward()
        return wrapped.module.seen, wrapped.module.mark.item()

    assert seen(subject) == seen(TorchDistributedDataParallel)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_join_throws_on_early_termination_where_it_is_asked_to(subject, rank):
    wrapped = subject(alike())

    def train():
        with wrapped.join(throw_on_early_termination=True):
            for _ in range(1 + rank):
                squared(wrapped, rank).backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()


@ddp
@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own optimizer uses names that torch has deprecated
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


@pytest.mark.beyond_contract("graphs that outlive their wrapper")
@ddp
@pytest.mark.world_size(2)
def test_a_graph_outlives_its_wrapper(subject, rank):
    model = alike()
    loss = squared(subject(model), rank)
    gc.collect()
    loss.backward()
    require_close(gradients(model), mean_gradients(2, squared))
