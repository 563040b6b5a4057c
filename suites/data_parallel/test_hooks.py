"""Communication hooks of DistributedDataParallel; torch's hooks run unchanged."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from pdlcheck.primitives import PowerSGDState, TopKState, bf16_compress, fp16_compress, power_sgd, top_k

from .models import TINY, alike, ddp, fitting, gradients, mean_gradients, net, plain_hook, require_close, squared


@ddp
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "name",
    [
        "allreduce_hook",
        "fp16_compress_hook",
        pytest.param("bf16_compress_hook", marks=pytest.mark.beyond_contract("bf16_compress_hook beside NCCL")),
    ],
)
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_torchs_hooks_run_unchanged(subject, rank, world_size, name, as_view):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = alike()
    wrapped = subject(model, gradient_as_bucket_view=as_view, **fitting(subject, TINY))
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
    assert [one[:2] for one in run(subject, **fitting(subject, TINY))] == 2 * [(0, False), (1, False), (2, True)]


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
def test_a_hook_is_registered_once_and_is_a_function(subject):
    wrapped = subject(alike())
    with pytest.raises(TypeError, match="register_comm_hook takes a function, got int"):
        wrapped.register_comm_hook(None, 1)
    wrapped.register_comm_hook(None, plain_hook)
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        wrapped.register_comm_hook(None, plain_hook)


def held(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def flat(bucket):
    dist.all_reduce(bucket.buffer())
    return bucket.buffer()


ANSWERS = {
    "tensor": (flat, "broken.* returned a Tensor; return a torch.futures.Future of the reduced buffer, such as dist"),
    "none": (lambda bucket: None, "broken.* returned None; return a torch.futures.Future"),
    "future of none": (lambda bucket: held(None), "broken.* returned holds None, not a tensor; return a torch.futures"),
    "future of too few": (lambda bucket: held(torch.ones(2)), r"broken.* returned holds 2 numbers for a bucket of \d+"),
}


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("sizes", [TINY, {}], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("where", [[1], [0, 1]], ids=["on rank 1", "on every rank"])
def test_a_hook_that_returns_no_future_of_a_bucket_is_named_on_every_rank(subject, rank, answer, sizes, where):
    give, message = ANSWERS[answer]

    def broken(state, bucket):
        return give(bucket) if rank in where else held(flat(bucket) if answer == "tensor" else bucket.buffer())

    wrapped = subject(alike(), **fitting(subject, sizes))
    wrapped.register_comm_hook(None, broken)
    ranks = "every rank" if len(where) == 2 else "rank 1"
    with pytest.raises(RuntimeError, match=f": on {ranks}, the .*communication hook .*{message}"):
        squared(wrapped, rank).backward()


@pytest.mark.beyond_contract("answers of hooks in other dtypes and shapes")
@ddp
@pytest.mark.world_size(2)
def test_a_hook_may_answer_in_another_dtype_or_in_a_list(subject, rank):
    def averaged(state, bucket):
        return held([flat(bucket).div(dist.get_world_size()).float().double().view(1, -1)])

    model = alike()
    wrapped = subject(model)
    wrapped.register_comm_hook(None, averaged)
    squared(wrapped, rank).backward()
    for name, goal in mean_gradients(2, squared).items():
        torch.testing.assert_close(gradients(model)[name], goal, rtol=1e-6, atol=1e-6)


@pytest.mark.beyond_contract("hooks on complex gradients")
@ddp
@pytest.mark.world_size(2)
def test_a_hook_sees_complex_gradients_as_they_are_and_in_pairs(subject, rank):
    seen = []

    def hook(state, bucket):
        bucket.set_buffer(bucket.buffer() * 1)
        (weight,) = bucket.gradients()
        seen.append((bucket.buffer().tolist(), weight.tolist()))
        return held(torch.view_as_complex(flat(bucket).view(-1, 2)) / 2)

    model = nn.Linear(2, 1, bias=False, dtype=torch.complex64)
    wrapped = subject(model)
    wrapped.register_comm_hook(None, hook)
    wrapped(torch.full((1, 2), rank + 1j)).real.sum().backward()
    assert seen == [([rank, -1] * 2, [[rank - 1j] * 2])]
    assert model.weight.grad.tolist() == [[0.5 - 1j] * 2]


# -- ranks that differ ------------------------------------------------------------------------------


def another_hook(state, bucket):
    return plain_hook(state, bucket)


def torchs_power_sgd(**settings):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    settings = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2} | settings
    return hooks.PowerSGDState(None, **settings), hooks.powerSGD_hook


class Named:
    """A state that names its attributes which must be equal on every rank, and has others."""

    same_on_every_rank = ("every",)

    def __init__(self, every):
        self.every, self.rank = every, dist.get_rank()


def own_power_sgd(module, **settings):
    return PowerSGDState(module, start_step=0, min_compression=0.1, **settings), power_sgd


# the registered hooks, by whether the rank is the odd one, and the names of both in the message
DIFFERENT = {
    "none": (lambda m, odd: None if odd else (None, plain_hook), "plain_hook", "none"),
    "one": (lambda m, odd: (None, plain_hook) if odd else None, "none", "plain_hook"),
    "another": (lambda m, odd: (None, another_hook if odd else plain_hook), "plain_hook", "another_hook"),
    "16 bits": (lambda m, odd: (None, bf16_compress if odd else fp16_compress), "fp16_compress", "bf16_compress"),
    "ratio": (
        lambda m, odd: (TopKState(m, ratio=0.5 if odd else 0.25), top_k),
        "top_k with ratio=0.25",
        "top_k with ratio=0.5",
    ),
    "rank": (lambda m, odd: own_power_sgd(m, rank=1 + odd), "power_sgd with rank=1", "power_sgd with rank=2"),
    "no state": (
        lambda m, odd: (None if odd else TopKState(m, ratio=0.25), top_k),
        "top_k with state=TopKState, ratio=0.25, error_feedback=True",
        "top_k",
    ),
    "torch's": (
        lambda m, odd: torchs_power_sgd(start_powerSGD_iter=2 + odd),
        "powerSGD_hook with start_powerSGD_iter=2",
        "powerSGD_hook with start_powerSGD_iter=3",
    ),
    "of a state": (
        lambda m, odd: (Named(1 + odd), plain_hook),
        "plain_hook with every=1",
        "plain_hook with every=2",
    ),
}


def require_refused(wrapped, model, rank, common, other):
    held = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # twice: the first error leaves no rank waiting
        with pytest.raises(ValueError, match="communication hook") as caught:
            squared(wrapped, rank).backward()
        assert str(caught.value) == (
            f"DistributedDataParallel needs the same communication hook on every rank, got {common} on ranks 0, 2 and "
            f"{other} on rank 1; register the same one, with the same settings, on every rank"
        )
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), held, strict=True))


@pytest.mark.beyond_contract("hooks that are compared between ranks")
@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("sizes", [TINY, {}], ids=["a bucket each", "one bucket"])
@pytest.mark.parametrize("case", DIFFERENT)
def test_hooks_that_differ_are_an_error_on_every_rank(subject, rank, case, sizes):
    make, common, other = DIFFERENT[case]
    model = alike()
    wrapped = subject(model, **fitting(subject, sizes))
    registered = make(model, rank == 1)
    if registered is not None:
        wrapped.register_comm_hook(*registered)
    require_refused(wrapped, model, rank, common, other)


@pytest.mark.beyond_contract("hooks that are compared between ranks")
@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("case", ["none", "one", "another"])
def test_hooks_that_differ_and_come_after_the_first_pass_are_an_error_on_every_rank(subject, rank, case):
    make, common, other = DIFFERENT[case]
    model = alike()
    wrapped = subject(model, **fitting(subject, TINY))
    squared(wrapped, rank).backward()
    registered = make(model, rank == 1)
    if registered is not None:
        wrapped.register_comm_hook(*registered)
    require_refused(wrapped, model, rank, common, other)


@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_states_may_differ_in_what_is_the_ranks_own(subject, rank, as_view, passes):
    model = alike(lambda: nn.Sequential(nn.Linear(2, 200), nn.Linear(200, 200), nn.Linear(200, 1)))
    wrapped = subject(model, gradient_as_bucket_view=as_view)
    for _ in range(passes):
        squared(wrapped, rank).backward()
    wrapped.register_comm_hook(Named(1), plain_hook)
    goal = mean_gradients(3, squared, lambda: copy.deepcopy(model))
    for _ in range(3):
        model.zero_grad()
        squared(wrapped, rank).backward()
        require_close(gradients(model), goal)


@pytest.mark.beyond_contract("hooks that are compared between ranks")
@ddp
@pytest.mark.world_size(3)
def test_hooks_are_compared_beside_a_rank_that_has_no_inputs(subject, rank):
    model = alike()
    wrapped = subject(model, **fitting(subject, TINY))
    wrapped.register_comm_hook(None, plain_hook)
    with wrapped.join():
        for _ in range(2 if rank else 0):
            model.zero_grad()
            squared(wrapped, rank).backward()
    if rank:
        alone = alike()
        (sum(squared(alone, r) for r in (1, 2)) / 3).backward()
        require_close(gradients(model), gradients(alone))


def test_hooks_are_compared_in_the_first_pass_only():
    from pdlcheck.primitives import DistributedDataParallel
    from pdlcheck.worlds import get_world

    def train(steps, hooked):
        wrapped = DistributedDataParallel(alike())
        if hooked:
            wrapped.register_comm_hook(None, plain_hook)
        for _ in range(steps):
            squared(wrapped, dist.get_rank()).backward()

    def calls(*arguments):
        world = get_world("sim")
        world.run(train, *arguments, world_size=2)
        return Counter({op: count.calls for op, count in world.traffic.by_operation.items()})

    for hooked in (False, True):  # the flags follow the hook's own messages
        assert calls(3, hooked) - calls(2, hooked) == calls(2, hooked) - calls(1, hooked) == {"all_reduce": 1 + hooked}
    assert calls(1, False) - calls(0, False) == {"all_reduce": 1, "broadcast": 1}
    assert calls(1, True) - calls(1, False) == {"all_reduce": 2, "all_gather": 2}
