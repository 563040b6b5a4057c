"""DistributedDataParallel under autocast, with a loss scaler, with hooks of ours, and with sums in another dtype."""

from __future__ import annotations

import pytest
import torch
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

from .comm_hook_models import residual
from .data_parallel_models import ddp

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
        size = bucket_bytes / 2**20
        return subject(module, bucket_cap_mb=size, first_bucket_mb=size, find_unused_parameters=find_unused)

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
                loss = wrapped(torch.ones(2, 3) * (torch.distributed.get_rank() + 1)).float().square().mean()
            bad = step == 1 and torch.distributed.get_rank() == 1
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
    assert scales == [1024, 512, 512] and moved[1] == 0 and moved[0] > 0 and moved[2] > 0
    if max_norm is not None:  # by the learning rate of 1; clipped before unscaling it were a thousandth
        assert max(moved) <= max_norm * 1.001 and moved[0] > max_norm * 0.5


@ddp
@pytest.mark.world_size(3)
def test_bfloat16_gradients_are_summed_in_the_dtype_that_is_asked_for(subject, rank):
    """256 + 1 + 1 is 256 in bfloat16, and 258 in float32."""
    values = [256.0, 1.0, 1.0]
    found = []
    for dtype in (None, torch.float32):
        model = nn.Linear(1, 1, bias=False).bfloat16()
        wrapped = subject(model, reduce_dtype=dtype)
        for _ in range(2):
            model.zero_grad()
            wrapped(torch.full((1, 1), 3 * values[rank], dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad.dtype == torch.bfloat16
        found.append(model.weight.grad.item())
    assert found[1] == 258
