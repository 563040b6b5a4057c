"""A test file that draws numbers when it is imported; run by ranks that are forked and by ranks that are launched."""

from __future__ import annotations

__all__ = ["SOURCE", "TESTS"]

TESTS = 5
SOURCE = """
import numpy

X = torch.rand(3)  # the same in every process that torchrun starts

def alike(value):
    others = value.clone()
    dist.broadcast(others, 0)
    return torch.equal(value, others)

@W
def test_what_the_module_drew():
    assert alike(X)

@W
@pytest.mark.parametrize("p", [torch.rand(3)])
def test_what_a_parameter_drew(p):
    assert alike(p)

@W
@pytest.mark.parametrize("p", [numpy.random.rand(3)])  # other numbers in each process, which is no other order
def test_what_numpy_drew(p):
    assert p.shape == (3,)

@W
def test_what_the_body_draws_is_each_ranks_own(rank):
    mine = torch.rand(3)
    assert alike(mine) == (rank == 0)

def drawn():
    return X.tolist(), torch.rand(1).item()

def test_functions(world):
    one, two = world.run(drawn, world_size=2)
    assert one[0] == two[0] and one[1] != two[1]
"""
