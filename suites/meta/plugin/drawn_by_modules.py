"""A test file that draws numbers at import, for forked and for launched ranks."""

from __future__ import annotations

__all__ = ["IN_ORDERS_OF_THEIR_OWN", "SEEDED", "SOURCE", "TESTS"]

_HEAD = """
import numpy, random

def all_gathered(value):
    others = [None, None]
    dist.all_gather_object(others, value)
    return others

def differ(value):
    one, two = all_gathered(value)
    return one != two
"""

TESTS = 7
SOURCE = (
    _HEAD
    + """
SEED = torch.initial_seed()  # another one in every process that torchrun starts
X = torch.rand(3).tolist()
Y = numpy.random.rand(3).tolist()
Z = random.random()
MODEL = torch.nn.Linear(2, 2)

@W
def test_what_the_module_drew(rank):
    assert differ(SEED) and differ(X) and differ(Y) and differ(Z) and differ(MODEL.weight.tolist())

@W
def test_a_model_that_is_broadcast_is_the_same(rank):
    for parameter in MODEL.parameters():
        dist.broadcast(parameter.data, 0)
    assert not differ(MODEL.weight.tolist())

@W
def test_what_torch_wraps_is_broadcast(rank):
    wrapped = torch.nn.parallel.DistributedDataParallel(MODEL)
    assert not differ(wrapped.module.weight.tolist())

@W
@pytest.mark.parametrize("p", [torch.rand(3)])
def test_what_a_parameter_drew(p):
    assert differ(p.tolist())

@W
@pytest.mark.parametrize("p", [numpy.random.rand(3)])  # other numbers in each process, which is no other order
def test_what_numpy_drew(p):
    assert p.shape == (3,) and differ(p.tolist())

@W
def test_what_the_body_draws_is_each_ranks_own_and_nothing_else(rank):
    mine = torch.rand(3).tolist()
    assert differ(mine) and mine != X
    assert differ(random.random()) and differ(numpy.random.rand())

def drawn():
    return X, torch.rand(1).item()

def test_functions(world):
    one, two = world.run(drawn, world_size=2)
    assert one[0] != two[0] and one[1] != two[1]
"""
)

SEEDED = (
    _HEAD
    + """
torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
DRAWN = torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random()

@W
def test_what_the_module_drew_from_a_seed(rank):
    assert not differ(DRAWN)
"""
)

IN_ORDERS_OF_THEIR_OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    name: str

@W
@pytest.mark.parametrize("config", {Config("a"), Config("b"), Config("c"), Config("d")})
def test_objects(rank, config):
    assert config.name in "abcd"
    names = [None, None]
    dist.all_gather_object(names, config.name)
    assert names[0] == names[1]

@W
@pytest.mark.parametrize("config", [Config("a"), Config("b")])
def test_list(rank, config):
    names = [None, None]
    dist.all_gather_object(names, config.name)
    assert names[0] == names[1]

@W
@pytest.mark.parametrize("name", {"a", "b", "c", "d"})
def test_names(name):
    names = [None, None]
    dist.all_gather_object(names, name)
    assert names[0] == names[1]
"""
