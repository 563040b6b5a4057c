"""DistributedDataParallel under autocast, with a loss scaler, with our hooks, and with sums in another dtype."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pdlcheck.checks import check_comm_hook
from pdlcheck.primitives import (
    DistributedGradScaler,
    PowerSGDState,
    TopKState,
    bf16_compress,
    fp16_compress,
    power_sgd,
    top_k,
)

from ..comm_hooks.models import residual
from .models import TINY, ddp, fitting

HOOKS = {
    "fp16": (lambda m: (None, fp16_compress), {"relative": 2**-9}),
    "bf16": (lambda m: (None, bf16_compress), {"relative": 2**-6}),
    "top_k": (lambda m: (TopKState(m, ratio=0.25), top_k), {"residual": residual}),
    "power_sgd": (lambda m: (PowerSGDState(m, start_step=1), power_sgd), {"residual": residual}),
}


@ddp
@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused"])
@pytest.mark.parametrize("name", HOOKS)
def test_our_hooks_keep_their_promises_in_our_wrapper(subject, world, name, unused):
    make, promise = HOOKS[name]

    def wrap(module, bucket_bytes, find_unused):
        sizes = dict.fromkeys(TINY, bucket_bytes / 2**20)
        return subject(module, find_unused_parameters=find_unused, **fitting(subject, sizes))

    check_comm_hook(make, world, wrap=wrap, unused=unused, steps=8, **promise)


@ddp
@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["", "clipped"])
def test_an_overflow_of_one_rank_skips_the_step_on_all_and_gradients_are_unscaled_before_clipping(
    subject, world, max_norm
):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        wrapped = subject(model)
        scaler = DistributedGradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        for step in range(3):
            before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(torch.ones(2, 3) * (dist.get_rank() + 1)).float().square().mean()
            bad = step == 1 and dist.get_rank() == 1
            scaler.scale(loss * (float("inf") if bad else 1)).backward()
            if max_norm is not None:
                scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
            after = nn.utils.parameters_to_vector(model.parameters()).detach()
            seen.append((float((after - before).norm()), scaler.get_scale(), after.tolist()))
        return seen

    first, *others = world.run(train, world_size=3)
    assert all(other == first for other in others)
    moved, scales = [step[0] for step in first], [step[1] for step in first]
    assert scales == [1024, 512, 512]
    assert moved[1] == 0
    assert moved[0] > 0
    assert moved[2] > 0
    if max_norm is not None:  # the learning rate is 1; clipping before unscaling would give a thousandth
        assert max(moved) <= max_norm * 1.001
        assert moved[0] > max_norm * 0.5


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@dataclass(frozen=True)
class Amp:
    """Mixed precision on some ranks: accumulation, clipping, and the micro-batches that overflow."""

    world_size: int
    micro_batches: int
    max_norm: float | None
    overflows: frozenset[tuple[int, int, int]]  # rank, step, micro-batch

    def backward(self, call, scaler, rank, step, micro):
        draws = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(torch.randn(2, 3, generator=draws)).float().square().mean() / self.micro_batches
        scaler.scale(loss * (float("inf") if (rank, step, micro) in self.overflows else 1)).backward()

    def end(self, model, optimizer, scaler):
        if self.max_norm is not None and isinstance(scaler, DistributedGradScaler):
            scaler.clip_grad_norm_(optimizer, self.max_norm)
        elif self.max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        scaler.step(optimizer)
        scaler.update()


SCALER = {"init_scale": 2.0**10, "growth_interval": 2}


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def numbers(states):
    model, optimizer, scaler = states
    return {**model, **scaler} | {n: state["momentum_buffer"] for n, state in optimizer["state"].items()}


@ddp
@settings(max_examples=8)
@given(
    amp=st.builds(
        Amp,
        world_size=st.integers(1, 3),
        micro_batches=st.integers(1, 3),
        max_norm=st.sampled_from([None, 0.05, 100.0]),
        overflows=st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2)), max_size=3),
    ),
    as_view=st.booleans(),
)
def test_a_scaled_step_under_autocast_is_that_of_one_process(subject, world, amp, as_view):
    """Each step is compared from the ranks' own state, because rounding to bfloat16 enlarges small differences."""

    def train():
        model, rank = three_layers(), dist.get_rank()
        wrapped = subject(model, gradient_as_bucket_view=as_view, **fitting(subject, TINY))
        optimizer, scaler = optimizer_of(model), DistributedGradScaler("cpu", **SCALER)
        held = []
        for step in range(5):
            held.append(copy.deepcopy([part.state_dict() for part in (model, optimizer, scaler)]))
            optimizer.zero_grad()
            for micro in range(amp.micro_batches):
                with nullcontext() if micro == amp.micro_batches - 1 else wrapped.no_sync():
                    amp.backward(wrapped, scaler, rank, step, micro)
            amp.end(model, optimizer, scaler)
        return held

    first, *others = world.run(train, world_size=amp.world_size)
    for held in others:
        torch.testing.assert_close(list(map(numbers, held)), list(map(numbers, first)), rtol=0, atol=0)
    for step, (before, after) in enumerate(pairwise(first)):
        alone = three_layers()
        optimizer, scaler = optimizer_of(alone), torch.amp.GradScaler("cpu", **SCALER)
        for part, state in zip((alone, optimizer, scaler), copy.deepcopy(before), strict=True):
            part.load_state_dict(state)
        for rank in range(amp.world_size):
            for micro in range(amp.micro_batches):
                amp.backward(alone, scaler, rank, step, micro)
        for p in alone.parameters():
            p.grad /= amp.world_size
        amp.end(alone, optimizer, scaler)
        found = [part.state_dict() for part in (alone, optimizer, scaler)]
        torch.testing.assert_close(numbers(found), numbers(after), rtol=1e-5, atol=1e-6)
        if any(at == step and r < amp.world_size and m < amp.micro_batches for r, at, m in amp.overflows):
            torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
            assert after[2]["scale"] == before[2]["scale"] / 2


@pytest.mark.if_subject_takes("reduce_dtype")
@ddp
@pytest.mark.world_size(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [256, 2**15], ids=["small", "large"])
def test_low_precision_gradients_are_summed_in_their_own_dtype_unless_another_is_asked_for(subject, rank, dtype, numel):
    """In float32 the mean is rounded once; in its own dtype each third and each sum is rounded."""
    terms = torch.randn(3, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact, limits = terms.double().mean(0), torch.finfo(dtype)
    once = limits.eps / 2 * exact.abs() + limits.tiny + 2.0**-21 * terms.double().abs().sum(0)  # and float32 sums
    for reduce_dtype in (None, torch.float32):
        model = nn.Linear(numel, 1, bias=False).to(dtype)
        wrapped = subject(model, reduce_dtype=reduce_dtype)
        for _ in range(2):
            model.zero_grad()
            wrapped(terms[rank : rank + 1]).sum().backward()
        assert model.weight.grad.dtype == dtype
        off = (model.weight.grad[0].double() - exact).abs()
        assert bool((off <= once).all()) == (reduce_dtype is not None)
        assert (off <= 6 * limits.eps * terms.double().abs().sum(0)).all()  # three thirds and three sums


class Wider(nn.Module):
    """A weight in bfloat16 whose gradient is in float32; some ranks have no gradient."""

    def __init__(self, dtype):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(1))
        self.weight.grad_dtype = dtype

    def forward(self, x, used):
        return (x * self.weight).sum() * self.scale if used else x.sum() * self.scale


@pytest.mark.beyond_contract("gradients of another dtype than their parameter")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("as_view", [False, True], ids=["copies", "views"])
def test_a_gradient_of_another_dtype_than_its_parameter_is_reduced_in_that(subject, rank, as_view):
    model = Wider(torch.float32)
    wrapped = subject(model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    x = torch.tensor([2 / 3, 4 / 3])
    for used in ((0, 1), (1,), (0,)):
        model.zero_grad()
        wrapped(x, rank in used).backward()
        assert model.weight.grad.dtype == torch.float32
        torch.testing.assert_close(model.weight.grad, x * len(used) / 2, rtol=1e-2, atol=0)
        mean = model.weight.grad.clone()
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        assert torch.equal(model.weight.grad, mean)


@pytest.mark.beyond_contract("error messages")
@ddp
@pytest.mark.world_size(2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_ranks_whose_gradients_have_other_dtypes_are_refused(subject, rank):
    with pytest.raises(ValueError, match=r"'weight' torch.bfloat16 .* requires a gradient in torch.float32"):
        subject(Wider(torch.float32 if rank else torch.bfloat16))
