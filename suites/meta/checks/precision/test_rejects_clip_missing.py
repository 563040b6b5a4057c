"""check_clip_grad_norm names the gradients that are missing from a norm, and the mistake in a returned norm."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_clip_grad_norm

GRADIENTS = [
    [torch.tensor([[3.0, 1.0]]), torch.tensor([2.0]), None],
    [torch.tensor([[4.0, -2.0]]), torch.tensor([5.0]), torch.tensor(7.0)],
]


def clipping(counts, returned=lambda norm, own, max_norm: norm):
    """Return a function that clips by the norm of the gradients for which ``counts(rank, place, gradient)`` is true."""

    def clip(parameters, max_norm):
        grads = {place: one.grad for place, one in enumerate(parameters) if one.grad is not None}
        counting = [grad for place, grad in grads.items() if counts(dist.get_rank(), place, grad)]
        own = sum((grad.double() ** 2).sum() for grad in counting) + torch.zeros((), dtype=torch.float64)
        squares = own.clone()
        dist.all_reduce(squares)
        norm = math.sqrt(squares)
        for grad in grads.values():
            grad *= min(1.0, max_norm / (norm + 1e-6))
        return returned(norm, math.sqrt(own), max_norm)

    return clip


def everything(rank, place, grad):
    return True


@pytest.mark.parametrize(
    ("counts", "missing"),
    [
        (lambda rank, place, grad: (rank, place) != (1, 1), "gradient 1 of rank 1 is"),
        (lambda rank, place, grad: place != 0, "gradient 0 of every rank is"),
        (lambda rank, place, grad: grad.dim() != 1, "gradient 1 of every rank is"),
        (lambda rank, place, grad: grad.dim() > 0, "gradient 2 of rank 1 is"),
    ],
)
def test_what_is_missing_from_the_norm_is_named(world, counts, missing):
    with pytest.raises(
        AssertionError, match=rf"rank 0 holds .*\n(.*\n)*  likely cause +{missing} missing from the norm\n"
    ):
        check_clip_grad_norm(clipping(counts), world, gradients=GRADIENTS, max_norm=1.0)


def test_the_gradients_of_a_dtype_may_be_missing(world):
    halves = [[own[0], own[1].half(), own[2] if own[2] is None else own[2].half()] for own in GRADIENTS]
    subject = clipping(lambda rank, place, grad: grad.dtype == torch.float32)
    with pytest.raises(AssertionError, match=r"the gradients of torch.float16 are missing from the norm\n"):
        check_clip_grad_norm(subject, world, gradients=halves, max_norm=1.0)


def test_the_norm_of_a_rank_alone_is_not_one_with_gradients_missing(world):
    """On two ranks, the norm of rank 0 alone is that without the gradients of rank 1."""

    def clip(parameters, max_norm):
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    with pytest.raises(AssertionError, match=r"likely cause +the norm of this rank alone was used") as caught:
        check_clip_grad_norm(clip, world, gradients=GRADIENTS, max_norm=1.0)
    assert "missing" not in str(caught.value)


def test_a_norm_that_no_missing_gradient_explains_has_no_cause(world):
    def clip(parameters, max_norm):
        return clipping(everything)(parameters, max_norm * 0.9)

    with pytest.raises(AssertionError, match="no known cause fits"):
        check_clip_grad_norm(clip, world, gradients=GRADIENTS, max_norm=1.0)


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        (lambda norm, own, max_norm: own, "the norm of this rank alone was used: it must be that of all ranks"),
        (lambda norm, own, max_norm: min(norm, max_norm), "it is the norm after clipping"),
        (lambda norm, own, max_norm: math.sqrt(norm**2 - 49), "gradient 2 of rank 1 is missing from the norm"),
        (lambda norm, own, max_norm: norm / 3, "no known cause fits"),
    ],
    ids=["own", "clipped", "missing", "unknown"],
)
def test_a_wrong_norm_that_is_returned_has_its_cause(world, returned, cause):
    subject = clipping(everything, returned)
    check_clip_grad_norm(clipping(everything), world, gradients=GRADIENTS, max_norm=1.0)
    with pytest.raises(AssertionError, match=rf"rank \d returns .*\n.*\n  likely cause +{cause}"):
        check_clip_grad_norm(subject, world, gradients=GRADIENTS, max_norm=1.0)
