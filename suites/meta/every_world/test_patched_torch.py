"""Attributes of torch's classes and modules that a rank sets by hand, as DeepSpeed's ``zero.Init`` does."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QuantStub

LINEAR, EMPTY, FORWARD = nn.Linear.__init__, torch.empty, nn.Module.__call__


class Model(nn.Module):
    """A layer of the user."""

    limit = 1

    def forward(self, x):
        return x


class Holder:
    class Layer(nn.Module):
        """A layer that its module does not contain under its name."""

        def forward(self, x):
            return x


MODEL = Model.forward


@contextlib.contextmanager
def exchanged(target, name, make):
    """Replace an attribute by ``make(attribute)`` while the block runs."""
    old = vars(target)[name]
    setattr(target, name, make(old))
    try:
        yield
    finally:
        setattr(target, name, old)


def tagging(group):
    def make(old):
        @functools.wraps(old)
        def init(self, *args, **kwargs):
            old(self, *args, **kwargs)
            self.owner = dist.get_rank(group)
            dist.broadcast(self.weight.data, 0, group=group)

        return init

    return make


@pytest.mark.world_size(2)
def test_layers_made_in_the_context_belong_to_this_rank(rank):
    with exchanged(nn.Linear, "__init__", tagging(dist.new_group([0, 1]))):
        layer = nn.Linear(2, 2)
    assert layer.owner == rank
    assert nn.Linear.__init__ is LINEAR


def adding(number):
    return lambda old: functools.wraps(old)(lambda *args, **kwargs: old(*args, **kwargs) + number)


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("target", "name", "use"),
    [
        (nn.ReLU, "forward", lambda: nn.ReLU()(torch.zeros(1))),
        (F, "relu", lambda: F.relu(torch.zeros(1))),
        (torch, "zeros", lambda: torch.zeros(1)),
        (torch.Tensor, "relu", lambda: torch.zeros(1).relu()),
        (Model, "forward", lambda: Model()(torch.zeros(1))),
        (QuantStub, "forward", lambda: QuantStub()(torch.zeros(1))),
        (Holder.Layer, "forward", lambda: Holder.Layer()(torch.zeros(1))),
    ],
    ids=["layer", "functional", "torch", "Tensor", "own layer", "torch.ao", "layer in a class"],
)
def test_each_rank_calls_what_it_has_set_itself(rank, target, name, use):
    before = vars(target).get(name)
    original = getattr(target, name)
    setattr(target, name, adding(10 * rank)(original))
    found = []
    for _ in range(3):
        dist.barrier()
        found.append(use().item())
    if before is None:
        delattr(target, name)
    else:
        setattr(target, name, before)
    dist.barrier()
    assert found == [10 * rank] * 3
    assert vars(target).get(name) is before


@pytest.mark.world_size(2)
def test_one_rank_alone_patches_every_layer(rank):
    if rank == 0:
        for layer in [nn.Module, *nn.Module.__subclasses__()]:
            layer.origin = "rank 0"
    dist.barrier()
    assert getattr(nn.Conv2d, "origin", None) == (None if rank else "rank 0")
    dist.barrier()
    if rank == 0:
        for layer in [nn.Module, *nn.Module.__subclasses__()]:
            del layer.origin


@pytest.mark.world_size(2)
def test_with_mocks_and_monkeypatch_of_the_same_attribute(rank, monkeypatch):
    nn.ReLU.forward = adding(1)(nn.ReLU.forward)
    monkeypatch.setattr(nn.ReLU, "forward", adding(10)(nn.ReLU.forward))
    with mock.patch.object(nn.ReLU, "forward", adding(100 * rank)(nn.ReLU.forward)):
        dist.barrier()
        assert nn.ReLU()(torch.zeros(1)) == 11 + 100 * rank
    dist.barrier()
    assert nn.ReLU()(torch.zeros(1)) == 11
    monkeypatch.undo()
    dist.barrier()
    assert nn.ReLU()(torch.zeros(1)) == 1
    nn.ReLU.forward = nn.ReLU.forward.__wrapped__


@pytest.mark.world_size(2)
def test_nothing_of_an_earlier_test_is_left():
    assert (nn.Linear.__init__, torch.empty, nn.Module.__call__, Model.forward) == (LINEAR, EMPTY, FORWARD, MODEL)
    assert not hasattr(nn.Conv2d, "origin")
    assert nn.ReLU()(torch.zeros(1)) == 0


@pytest.fixture
def tagged(rank):
    with exchanged(nn.Linear, "extra_repr", lambda old: lambda self: f"of rank {rank}"):
        yield


@pytest.mark.world_size(2)
def test_what_a_ranks_fixture_patches_is_its_own_in_the_body(tagged, rank):
    dist.barrier()
    assert repr(nn.Linear(1, 1)) == f"Linear(of rank {rank})"


@pytest.fixture(scope="module")
def tagged_for_all():
    with exchanged(nn.Bilinear, "extra_repr", lambda old: lambda self: "of all"):
        yield


@pytest.mark.world_size(2)
@pytest.mark.parametrize("time", range(2))
def test_what_a_wider_fixture_patches_holds_on_all_ranks(tagged_for_all, time):
    dist.barrier()
    assert repr(nn.Bilinear(1, 1, 1)) == "Bilinear(of all)"


def test_what_the_controller_patches_holds_on_simulated_ranks():
    from pdlcheck.worlds import get_world

    world = get_world("sim")
    assert world.run(lambda: repr(nn.ReLU()), world_size=2) == ["ReLU()"] * 2
    with exchanged(nn.ReLU, "extra_repr", lambda old: lambda self: "of the controller"):
        assert world.run(lambda: repr(nn.ReLU()), world_size=2) == ["ReLU(of the controller)"] * 2
    assert world.run(lambda: repr(nn.ReLU()), world_size=2) == ["ReLU()"] * 2


def patched_and_left():
    nn.ReLU.extra_repr = lambda self: f"of rank {dist.get_rank()}"


def test_ranks_that_are_kept_keep_what_they_have_set():
    from pdlcheck.worlds import get_world

    world = get_world("sim")
    with world.open(2) as ranks:
        ranks.run(patched_and_left)
        assert repr(nn.ReLU()) == "ReLU()"
        assert ranks.run(lambda: repr(nn.ReLU())) == ["ReLU(of rank 0)", "ReLU(of rank 1)"]
    assert world.run(lambda: repr(nn.ReLU()), world_size=2) == ["ReLU()"] * 2


WITHOUT_NUMBERS = """
import torch, torch.distributed as dist
from torch import nn
from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.process_state import versions
versions.IN_CLASS = versions.IN_DICT = None

def program():
    if dist.get_rank() == 0:
        nn.ReLU.origin = "rank 0"
    dist.barrier()
    return getattr(nn.ReLU, "origin", None)

print(get_world("sim", schedule="first").run(program, world_size=2))
"""


def test_where_python_numbers_no_versions_ranks_share_them_and_nothing_breaks():
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBERS], capture_output=True, text=True, check=False)
    assert done.stdout == "['rank 0', 'rank 0']\n", done.stderr


BY_HAND = """
def patch(group):
    old = torch.optim.Optimizer.zero_grad

    def summed(self, *args, **kwargs):
        dist.all_reduce(torch.ones(1), group=group)
        return old(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = summed
    return old

@W
def test_by_mock(rank):
    from unittest import mock
    group, old = dist.new_group([0, 1]), torch.optim.Optimizer.zero_grad

    def summed(self, *args, **kwargs):
        dist.all_reduce(torch.ones(1), group=group)
        return old(self, *args, **kwargs)

    with mock.patch.object(torch.optim.Optimizer, "zero_grad", summed):
        dist.barrier()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).zero_grad()

@W
def test_by_hand(rank):
    old = patch(dist.new_group([0, 1]))
    dist.barrier()
    try:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).zero_grad()
    finally:
        torch.optim.Optimizer.zero_grad = old
"""


@pytest.mark.slow
def test_an_attribute_that_ranks_share_is_named_with_who_has_set_it(run):
    result = run(BY_HAND, world="sim,gloo", new_process=True)  # the tests leave torch changed
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines([
        "E*torch.optim.optimizer.Optimizer.zero_grad is now summed() of test_inner.py:*, which rank ? has set; "
        "simulated ranks share this attribute, *name torch.optim.optimizer in pdlcheck_own_globals*"
    ])  # fmt: skip
    result.stdout.no_fnmatch_line("*not because simulated ranks share*")
    result.stdout.no_fnmatch_line("*module globals*")


def test_an_attribute_whose_module_is_named_is_each_ranks_own(run):
    run(BY_HAND, "-o", "pdlcheck_own_globals=torch.optim.optimizer", world="sim").assert_outcomes(passed=2)


SPECIAL = """
@W
def test_by_hand(rank):
    cls, old = torch.optim.SGD, torch.optim.SGD.__init__

    def init(self, *args, **kwargs):
        old(self, *args, **kwargs)
        self.owner = rank

    cls.__init__ = init
    dist.barrier()
    owner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).owner
    cls.__init__ = old
    assert owner == rank
"""


def test_special_methods_too(run):
    run(SPECIAL, "-o", "pdlcheck_own_globals=torch.optim.sgd", world="sim").assert_outcomes(passed=1)
