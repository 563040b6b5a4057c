"""check_derivative on the functions of tensor, sequence and expert parallel layers: right ones, and broken twins."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as of_torch

from pdlcheck.checks import check_derivative


def square(rank):
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(rank))


def own(x, dim):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def joined(x, dim):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim)


def summed(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def summed_in_place(x):
    dist.all_reduce(x)
    return x


def exchanged(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def sent_on(x, by=1):
    """Return the tensor of the rank before this one."""
    return joined(x[None], 0)[(dist.get_rank() - by) % dist.get_world_size()]


def function(forward, backward, dirty=False):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if dirty:
                ctx.mark_dirty(x)
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Function.apply


def with_contiguous_gradients(fn):
    def function(x):
        outputs = fn(x)
        for one in outputs:
            if one.requires_grad:
                one.register_hook(lambda grad: grad.contiguous())
        return outputs

    return function


RIGHT = {
    "scatter": (lambda x: own(x, 1), lambda grad: joined(grad, 1), {"inputs": "replicated"}),
    "gather": (lambda x: joined(x, 1), lambda grad: own(grad, 1), {"outputs": "replicated"}),
    "sequence gather": (lambda x: joined(x, 0), lambda grad: own(summed(grad), 0), {}),
    "sequence reduce-scatter": (lambda x: own(summed(x), 0), lambda grad: joined(grad, 0), {}),
    "all-to-all": (exchanged, exchanged, {}),
    "ring": (sent_on, lambda grad: sent_on(grad, -1), {}),
    "sum in place": (summed_in_place, lambda grad: grad, {"outputs": "replicated"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_check_derivative_accepts_the_functions_of_parallel_layers(world, name):
    forward, backward, words = RIGHT[name]
    check_derivative(function(forward, backward), square, world, world_size=3, **words)


def test_check_derivative_accepts_a_function_that_marks_its_input_as_overwritten(world):
    subject = function(summed_in_place, lambda grad: grad, dirty=True)
    check_derivative(subject, square, world, outputs="replicated", world_size=3)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "subject",
    [
        of_torch.all_reduce,
        with_contiguous_gradients(of_torch.all_gather),
        lambda x: of_torch.reduce_scatter(torch.empty_like(x[0]), list(x.unbind())),
        lambda x: of_torch.all_to_all_single(torch.empty_like(x), x),
        lambda x: of_torch.broadcast(x, 1),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"],
)
def test_check_derivative_accepts_torchs_functions(world, subject):
    check_derivative(subject, square, world, world_size=3)


PLACES = "the right numbers are at other places, the difference quotient at .* is what {} holds at .*: backward splits"
OUTPUTS, COPY = "it has only the part of this rank's own outputs", "it has only the part of this rank's copy"
WRONG = {
    "own slice": (lambda x: joined(x, 0), lambda grad: own(grad, 0), {}, OUTPUTS),
    "sum of copies": (
        lambda x: joined(x, 0),
        lambda grad: own(summed(grad), 0),
        {"outputs": "replicated"},
        "it is world_size = 3 times too large: equal gradients are added over the ranks",
    ),
    "other dimension": (
        lambda x: joined(x, 0),
        lambda grad: own(grad, 1).reshape(3, 3),
        {"outputs": "replicated"},
        PLACES.format("rank [12]"),
    ),
    "other order": (
        lambda x: own(x, 1),
        lambda grad: joined(grad, 1).roll(1, 1),
        {"inputs": "replicated"},
        PLACES.format("this rank"),
    ),
    "no exchange": (exchanged, lambda grad: grad, {}, PLACES.format("rank [12]")),
    "no gather": (
        lambda x: own(x, 1),
        lambda grad: torch.cat([grad if rank == dist.get_rank() else 0 * grad for rank in range(3)], 1),
        {"inputs": "replicated"},
        COPY,
    ),
    "same direction": (sent_on, sent_on, {}, "it is the gradient of rank 1"),
    "factor": (
        summed,
        lambda grad: summed(grad) * 2**0.5,
        {},
        "it is 1.41421 times the difference quotient: backward has a factor that forward does not have",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_derivative_names_the_fault_of_a_parallel_layer(world, name):
    forward, backward, words, cause = WRONG[name]
    with pytest.raises(AssertionError, match=rf"\n  likely cause +{cause}") as caught:
        check_derivative(function(forward, backward), square, world, world_size=3, **words)
    assert "causes fit" not in str(caught.value)


def test_check_derivative_names_the_ranks_whose_gradients_are_wrong(world):
    subject = function(summed, lambda grad: summed(grad) * (2 if dist.get_rank() == 1 else 1))
    with pytest.raises(AssertionError, match=r"on rank 1 is .*\n.*\n  wrong ranks +1 of 3\n.*it is 2 times"):
        check_derivative(subject, square, world, world_size=3)


def test_check_derivative_does_not_take_equal_numbers_for_numbers_at_other_places(world):
    """The derivatives of a row are equal; the last column is lost, and no number is at another place."""

    def lost(grad):
        grad = grad.expand(3, 3).clone()
        grad[:, 2] = 0
        return grad

    right = function(lambda x: x.sum(1, keepdim=True), lambda grad: grad.expand(3, 3))
    check_derivative(right, square, world, world_size=3)
    subject = function(lambda x: x.sum(1, keepdim=True), lost)
    with pytest.raises(AssertionError, match="no known cause fits"):
        check_derivative(subject, square, world, world_size=3)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return summed(x * weight)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def test_check_derivative_tells_a_gradient_that_is_not_returned_from_a_cut_graph(world):
    with pytest.raises(
        AssertionError, match=r"input 1 on rank 0 .*\n.*\n.*\n.*arrived: backward returns None for this"
    ):
        check_derivative(Product.apply, lambda rank: (square(rank), square(rank + 7)), world, outputs="replicated")
    with pytest.raises(AssertionError, match=r"no gradient arrived: a collective of torch.distributed, or detach"):
        check_derivative(lambda x, y: x + summed(y.detach()), lambda rank: (square(rank), square(rank + 7)), world)


def test_check_derivative_sees_a_fault_in_one_element_of_many(world):
    """The element is none of those that are moved alone."""

    def spoilt(grad):
        grad = grad.clone()
        grad[-1] *= 1.1
        return grad

    def large(rank):
        return torch.linspace(-1, 1, 1001) + rank

    check_derivative(function(lambda x: x.clone(), lambda grad: grad), large, world)
    with pytest.raises(AssertionError, match=r"along a direction of all elements, the difference .*\n.* 0 of 6 that"):
        check_derivative(function(lambda x: x.clone(), spoilt), large, world)


def test_check_derivative_takes_kinks_of_elements_that_are_not_looked_at(world):
    """One of a thousand elements is at the kink of relu, so the direction of all elements shows nothing."""
    check_derivative(lambda x: x.relu(), lambda rank: torch.linspace(-1, 1, 1001).roll(rank), world)


def test_check_derivative_rejects_a_backward_pass_that_needs_contiguous_gradients(world):
    """The buffer has the strides of the gradient, so reshape() copies it, and the sum is thrown away."""

    def lost(grad):
        total = grad.clone()
        dist.all_reduce(total.reshape(-1))
        return own(total, 0)

    def kept(grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total.reshape(-1))
        return own(total, 0)

    check_derivative(function(lambda x: joined(x, 0), kept), square, world)
    message = r"is .* at .* if the gradients of the outputs are not contiguous, .*\n  likely cause +backward assumes"
    with pytest.raises(AssertionError, match=message):
        check_derivative(function(lambda x: joined(x, 0), lost), square, world)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_check_derivative_rejects_torchs_all_gather_for_other_backends_than_nccl(world):
    """Its backward pass receives into buffers that have the strides of the gradients."""
    with pytest.raises((RuntimeError, AssertionError), match="contiguous"):
        check_derivative(of_torch.all_gather, square, world)
