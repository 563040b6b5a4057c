"""check_derivative rejects backward passes that are not the derivative, and passes the right ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pdlcheck.checks import check_derivative
from pdlcheck.errors import Inconclusive

from ..layers_by_hand import Add, Copy


def inputs(rank):
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))


def function(forward, backward):
    """Return a function over ranks whose forward and backward passes communicate as these words say."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            if forward == "sum":
                dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            if backward != "own":
                dist.all_reduce(grad)
            return grad * {"negative": -1, "mean": 1 / dist.get_world_size(), "zero": 0}.get(backward, 1)

    return Function.apply


# Words for the forward and the backward pass, the inputs and the outputs.
RIGHT = [
    ("own", "own", "own", "own"),
    ("own", "own", "replicated", "replicated"),
    ("own", "sum", "replicated", "own"),
    ("sum", "own", "own", "replicated"),
    ("sum", "sum", "own", "own"),
    ("sum", "sum", "replicated", "replicated"),
]
WRONG = [
    ("sum", "own", "own", "own", "only the part of this rank's own outputs"),
    ("sum", "own", "replicated", "replicated", "only the part of this rank's copy: backward lacks the all_reduce"),
    ("sum", "sum", "own", "replicated", "world_size = 3 times too large"),
    ("sum", "mean", "own", "own", "divided by world_size = 3"),
    ("sum", "negative", "own", "own", "wrong sign"),
    ("sum", "zero", "own", "own", "backward returns zeros"),
    ("own", "sum", "own", "own", "the sum of the gradients of all ranks, although the input is this rank's own"),
    ("own", "mean", "own", "own", "the mean of the gradients of all ranks"),
]


@pytest.mark.parametrize(("forward", "backward", "of_inputs", "of_outputs"), RIGHT)
def test_check_derivative_accepts_the_derivative(world, forward, backward, of_inputs, of_outputs):
    check_derivative(function(forward, backward), inputs, world, inputs=of_inputs, outputs=of_outputs, world_size=3)


@pytest.mark.parametrize(("forward", "backward", "of_inputs", "of_outputs", "cause"), WRONG)
def test_check_derivative_names_the_cause(world, forward, backward, of_inputs, of_outputs, cause):
    subject = function(forward, backward)
    with pytest.raises(AssertionError, match=rf"gradient of input 0 on rank 0 is .*\n.*\n.*\n.*{cause}"):
        check_derivative(subject, inputs, world, inputs=of_inputs, outputs=of_outputs, world_size=3)


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


def test_check_derivative_rejects_a_collective_that_cuts_the_graph(world):
    check_derivative(lambda x: Gather.apply(x).square().sum(0), inputs, world)
    with pytest.raises(AssertionError, match="no gradient arrived: a collective of torch"):
        check_derivative(lambda x: gathered(x).square().sum(0), inputs, world)


def test_check_derivative_accepts_a_backward_pass_that_overwrites_its_argument(world):
    """``Copy`` adds over ranks in the gradient that it receives; the weights of the check must survive that."""
    check_derivative(Copy.apply, inputs, world, inputs="replicated")
    check_derivative(Add.apply, inputs, world, outputs="replicated")


def test_check_derivative_rejects_an_output_that_is_not_replicated(world):
    with pytest.raises(AssertionError, match="output 0 of rank 1 differs from that of rank 0, it is declared as rep"):
        check_derivative(lambda x: x * 2, inputs, world, outputs="replicated")


def test_check_derivative_takes_a_word_for_each_input_and_output(world):
    def layer(x, weight, scale):
        return Add.apply(x * weight) * scale, x + weight

    def make(rank):
        return inputs(rank), inputs(rank + 7), 2

    check_derivative(layer, make, world, inputs=["own", "own"], outputs=["replicated", "own"])
    with pytest.raises(AssertionError, match="gradient of input 1 on rank 0"):
        check_derivative(layer, make, world, inputs=["own", "replicated"], outputs=["replicated", "own"])


def test_check_derivative_looks_at_some_elements_of_large_inputs(world):
    def large(rank):
        return torch.linspace(-1, 1, 1001) + rank

    check_derivative(Add.apply, large, world, outputs="replicated")
    with pytest.raises(AssertionError, match="6 of 6 that were looked at"):
        check_derivative(Add.apply, large, world)


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        (lambda x: torch.nn.functional.dropout(x, 0.5), "gave two results for one input"),
        (lambda x: x.detach() * 0, "does not depend on any input"),
        (lambda x: (x - x.detach()).abs(), "does not depend on any input"),
        (lambda x: (x - inputs(dist.get_rank()).double()).relu(), "a kink there"),
        (lambda x: x.float().square().double(), "does not compute in float64"),
    ],
    ids=["dropout", "constant", "detached", "kink", "float32"],
)
def test_check_derivative_does_not_decide_without_a_derivative(world, subject, words):
    with pytest.raises(Inconclusive, match=words):
        check_derivative(subject, inputs, world)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": "shared"}, "inputs must be 'own' or 'replicated', got 'shared'"),
        ({"outputs": ["own", "own"]}, "outputs must be one word, or one for each of the 1 outputs, got 2"),
    ],
)
def test_check_derivative_names_a_wrong_argument(world, changes, words):
    with pytest.raises(ValueError, match=words):
        check_derivative(lambda x: x, inputs, world, **changes)


def test_check_derivative_needs_tensors(world):
    with pytest.raises(TypeError, match="at least one floating-point tensor, got int"):
        check_derivative(lambda x: x, lambda rank: 3, world)
    with pytest.raises(TypeError, match="the function must return tensors, it returned float"):
        check_derivative(lambda x: 1.0, inputs, world)
