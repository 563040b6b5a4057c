"""A collective that would write to an expanded tensor, such as the gradient of a sum, is refused on every world."""

from __future__ import annotations

import pytest

BACKWARD = """
class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous() if CONTIGUOUS else gradient
        dist.all_reduce(gradient)
        return gradient

@W
def test_the_gradient_is_added_over_ranks():
    inputs = torch.ones(64, requires_grad=True)
    Copied.apply(inputs).sum().backward()
    assert inputs.grad.tolist() == [2.0] * 64
"""

CALLS = """
CALLS = [
    lambda out: dist.all_reduce(out),
    lambda out: dist.broadcast(out, 0),
    lambda out: dist.reduce(out, 0),
    lambda out: dist.all_gather([out, out], torch.ones(4)),
    lambda out: dist.irecv(out, 1 - dist.get_rank()),
]

@W
@pytest.mark.parametrize("call", CALLS)
def test_an_expanded_output(call):
    with pytest.raises(RuntimeError, match=r"share memory: shape \\(4,\\), strides \\(0,\\).*call .contiguous"):
        call(torch.ones(1).expand(4))

@W
def test_what_only_looks_like_it(rank):
    for out in torch.ones(1, 3).expand(1, 3), torch.ones(0).expand(3, 0), torch.ones(2, 3).T:
        dist.all_reduce(out)
        assert (out == 2).all()
"""


@pytest.mark.parametrize("world", ["sim", "gloo", "mpi"])
def test_an_expanded_gradient_is_refused_with_the_cure_and_a_contiguous_one_is_added(run, world):
    run("CONTIGUOUS = True" + BACKWARD, world=world).assert_outcomes(passed=1)
    result = run("CONTIGUOUS = False" + BACKWARD, world=world)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*RuntimeError: all_reduce would write to a tensor whose elements share memory: shape (64,), strides (0,)*"]
    )


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_every_output_is_looked_at(run, world):
    run(CALLS, world=world).assert_outcomes(passed=6)
