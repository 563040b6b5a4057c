"""The check of clipping rejects ranks that treat inf or NaN differently, and accepts whatever all ranks do alike."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pdlcheck.checks import check_clip_grad_norm
from pdlcheck.primitives import clip_grad_norm

SHARDED = [[torch.tensor([3.0, 0.0])], [torch.tensor([4.0, 1.0]), torch.tensor([12.0])], [None]]
REPLICATED = [[torch.tensor([3.0, 4.0]), torch.tensor(2.0)]] * 3
COPIES = [[True] * 2, [False] * 2, [False] * 2]


def grads_of(parameters):
    return [p.grad for p in parameters if p.grad is not None]


def own_squares(parameters):
    return sum((grad.double() ** 2).sum() for grad in grads_of(parameters)) + torch.zeros((), dtype=torch.float64)


def norm_of(squares):
    dist.all_reduce(squares)
    return float(squares.sqrt())


def scaled(parameters, norm, max_norm):
    for grad in grads_of(parameters):
        grad *= min(1.0, max_norm / (norm + 1e-6))
    return norm


def clipped(parameters, max_norm, *, before=lambda parameters: None, after=lambda parameters, norm: norm):
    before(parameters)
    norm = norm_of(own_squares(parameters))
    return after(parameters, scaled(parameters, norm, max_norm))


def sanitised(parameters):
    for grad in grads_of(parameters):
        grad.nan_to_num_(0.0, 0.0, 0.0)


def removed(parameters, norm):
    if not math.isfinite(norm):
        for p in parameters:
            p.grad = None
    return norm


def zeroed(parameters, norm):
    if not math.isfinite(norm):
        for grad in grads_of(parameters):
            grad.zero_()


def overflow_is_minus_one(parameters, norm):
    return norm if math.isfinite(norm) else -1.0


def refused(parameters, norm):
    if not math.isfinite(norm):
        raise RuntimeError(f"the norm is {norm}")


@pytest.mark.parametrize(
    "right",
    [
        clipped,
        partial(clipped, before=sanitised),
        *(partial(clipped, after=after) for after in (removed, zeroed, overflow_is_minus_one, refused)),
        partial(clip_grad_norm, sharded=True),
        partial(clip_grad_norm, sharded=True, error_if_nonfinite=True),
    ],
)
@pytest.mark.parametrize("max_norm", [1.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_all_ranks_do_is_right(world, right, max_norm, dtype):
    given = [[None if grad is None else grad.to(dtype) for grad in own] for own in SHARDED]
    check_clip_grad_norm(right, world, gradients=given, max_norm=max_norm)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, partial(clip_grad_norm, agree=False), clip_grad_norm])
def test_copies_of_one_gradient_are_not_finite_together(world, clip, strict):
    subject = partial(clip, error_if_nonfinite=strict)
    check_clip_grad_norm(subject, world, gradients=REPLICATED, max_norm=1.0, counted=COPIES)


def leaves_alone(parameters, max_norm):
    squares = own_squares(parameters)
    return scaled(parameters, norm_of(squares), max_norm) if torch.isfinite(squares) else math.inf


def raises_alone(parameters, max_norm):
    own = own_squares(parameters)
    if not torch.isfinite(own.clone()):
        dist.all_reduce(own)
        raise ValueError("not finite")
    return scaled(parameters, norm_of(own), max_norm)


def skips_alone(parameters, max_norm):
    """Skip clipping if this rank's own gradients are not finite.

    Other ranks multiply theirs by 0, because the norm is inf.
    """
    own = own_squares(parameters)
    norm = norm_of(own.clone())
    if torch.isfinite(own):
        scaled(parameters, norm, max_norm)


def removes_alone(parameters, max_norm):
    own = own_squares(parameters)
    scaled(parameters, norm_of(own.clone()), max_norm)
    if not torch.isfinite(own):
        for p in parameters:
            p.grad = None


def tells_its_own(parameters, max_norm):
    own = own_squares(parameters)
    norm = clipped(parameters, max_norm)
    return norm if math.isfinite(norm) else float(own.sqrt())


def loses_nan(parameters, max_norm):
    everyone = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own_squares(parameters))
    return scaled(parameters, float(torch.stack(everyone).nansum().sqrt()), max_norm)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (leaves_alone, r"a rank is left waiting where gradients .*\n  not finite .* inf in gradients of rank 1\n"),
        (raises_alone, r"rank 1 raises ValueError: not finite, rank 0 goes on\n.* inf .* of rank 1\n.*must be that of"),
        (skips_alone, r"rank 0 multiplies by 0 gradient 0, rank 1 leaves its gradient 0\n.* inf .* rank 1\n.*goes by"),
        (removes_alone, r"rank \d .* gradient \d, rank \d .* its gradient \d\n.* inf .* of rank 1\n.*goes by its own"),
        (tells_its_own, r"rank 1 returns inf, rank 0 returns 3\n.* inf .* of rank 1\n.*in different ways"),
        (loses_nan, r"rank 0 returns 3, gradients of rank 1 are not finite\n.* nan in .* rank 1\n.*may drop NaN"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_part_are_rejected(world, broken, message):
    with pytest.raises(AssertionError, match=f"^{broken.__name__}: {message}"):
        check_clip_grad_norm(broken, world, gradients=SHARDED, max_norm=1.0)


def on_rank_0_alone(parameters, max_norm):
    norm = float(nn.utils.clip_grad_norm_(parameters, max_norm))
    if dist.get_rank() == 0 and not math.isfinite(norm):
        for p in parameters:
            p.grad = None


def test_replicas_that_part_are_rejected(world):
    with pytest.raises(AssertionError, match=r"^on_rank_0_alone: .*removes.*\n.* inf in gradients of ranks 0, 1, 2\n"):
        check_clip_grad_norm(on_rank_0_alone, world, gradients=REPLICATED, max_norm=1.0, counted=COPIES)
