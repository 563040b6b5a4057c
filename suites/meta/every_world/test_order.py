"""Equal calls in another order are distinguished from one call that ranks reach in two branches, on both worlds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds import get_world


@pytest.fixture(scope="module", params=["sim", "gloo"])
def world(request):
    world = get_world(request.param)
    yield world
    world.close()


def is_odd() -> bool:
    return dist.get_rank() % 2 == 1


def add(tensor):
    dist.all_reduce(tensor)


class Layer:
    def __init__(self):
        self.weight, self.bias = torch.ones(2), torch.ones(2)

    def sync_weight(self):
        dist.all_reduce(self.weight)

    def sync_bias(self):
        dist.all_reduce(self.bias)


# -- another order --------------------------------------------------------------------------------


def two_variables():
    a, b = torch.ones(3), torch.zeros(3)
    first, second = (b, a) if is_odd() else (a, b)
    dist.all_reduce(first)
    dist.all_reduce(second)


def two_branches():
    a, b = torch.ones(3), torch.zeros(3)
    if is_odd():
        dist.all_reduce(b)
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.all_reduce(b)


def same_lines_in_another_order():
    for part in reversed(["a", "b"]) if is_odd() else ["a", "b"]:
        if part == "a":
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_reduce(torch.zeros(3))


def through_a_helper():
    a, b = torch.ones(3), torch.zeros(3)
    for tensor in (b, a) if is_odd() else (a, b):
        add(tensor)


def tensors_without_a_variable():
    x = torch.ones(3)
    if is_odd():
        add(x * 3)
        add(x * 2)
    else:
        add(x * 2)
        add(x * 3)


def entries_of_a_dict():
    grads = {"w1": torch.ones(3), "w2": torch.ones(3)}
    for name in reversed(grads) if is_odd() else grads:
        dist.all_reduce(grads[name])


def parameters_of_a_module():
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights = [layer.weight for layer in model]
    for p in reversed(weights) if is_odd() else weights:
        dist.all_reduce(p.grad)


class Optimizer:
    """An optimizer that keeps parameters as torch's do."""

    def __init__(self):
        self.param_groups = [{"params": [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], "lr": 0.1}]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = torch.ones(2)

    def sync(self):
        for group in self.param_groups:
            for p in reversed(group["params"]) if is_odd() else group["params"]:
                dist.all_reduce(p.grad)


def parameters_of_an_optimizer():
    Optimizer().sync()


def methods():
    layer = Layer()
    for method in (layer.sync_bias, layer.sync_weight) if is_odd() else (layer.sync_weight, layer.sync_bias):
        method()


def asynchronously():
    a, b = torch.ones(3), torch.zeros(3)
    for work in [dist.all_reduce(t, async_op=True) for t in ((b, a) if is_odd() else (a, b))]:
        work.wait()


def three_in_a_circle():
    a, b, c = torch.ones(3), torch.ones(3), torch.ones(3)
    for tensor in (b, c, a) if is_odd() else (a, b, c):
        dist.broadcast(tensor, 0)


def one_line_that_no_rank_decides_on():
    a, b = torch.ones(3), torch.zeros(3)
    for first in (False, True) if is_odd() else (True, False):
        dist.all_reduce(a if first else b)


def branches_that_no_rank_decides_on():
    a, b = torch.ones(3), torch.zeros(3)
    for name in ("b", "a") if is_odd() else ("a", "b"):
        if name == "a":
            dist.all_reduce(a)
        else:
            dist.all_reduce(b)


def gathers():
    a, b = torch.ones(2), torch.zeros(2)
    out = [torch.empty(2) for _ in range(dist.get_world_size())]
    for tensor in (b, a) if is_odd() else (a, b):
        dist.all_gather(out, tensor)


BROKEN = [
    two_variables,
    two_branches,
    same_lines_in_another_order,
    one_line_that_no_rank_decides_on,
    branches_that_no_rank_decides_on,
    through_a_helper,
    tensors_without_a_variable,
    entries_of_a_dict,
    parameters_of_a_module,
    parameters_of_an_optimizer,
    methods,
    asynchronously,
    three_in_a_circle,
    gathers,
]


@pytest.mark.parametrize("program", BROKEN, ids=lambda program: program.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_another_order_is_reported(world, program, world_size):
    ranks = {2: "ranks 0 and 1", 3: "rank 1 and ranks 0, 2"}[world_size]
    with pytest.raises(CollectiveMismatch, match=f"^{ranks} differ in the order of equal calls") as caught:
        assert world.run(program, world_size=world_size) == [None] * world_size
    assert caught.value.what == "the order"
    assert caught.value.odd == ([1] if world_size == 3 else [])
    assert [line[:7] for line in caught.value.ranks] == ["rank 0:", "rank 1:"]
    assert all("test_order.py:" in line for line in caught.value.ranks)


def test_the_report_names_the_tensors_of_both_ranks(world):
    with pytest.raises(CollectiveMismatch) as caught:
        world.run(two_branches, world_size=2)
    line = two_branches.__code__.co_firstlineno
    path = f"{__name__.rpartition('.')[2]}.py"
    zero, one = caught.value.ranks
    assert zero.startswith("rank 0: `a` in collective 0 at ")
    assert f"{path}:{line + 6}, then `b` in collective 1 at " in zero
    assert one.startswith("rank 1: `b` in collective 0 at ")
    assert f"{path}:{line + 3}, then `a` in collective 1 at " in one


# -- their twins, and what only looks alike -------------------------------------------------------


def the_same_order():
    a, b = torch.ones(3), torch.zeros(3)
    for tensor in (a, b, a):
        add(tensor)


def one_collective_from_two_branches():
    for _ in range(3):
        if is_odd():
            x = torch.ones(3)
            dist.all_reduce(x)
        else:
            y = torch.zeros(3)
            dist.all_reduce(y)


def taking_turns():
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            mine = torch.ones(3)
            dist.all_reduce(mine)
        else:
            zeros = torch.zeros(3)
            dist.all_reduce(zeros)


def taking_turns_on_one_line():
    mine, zeros = torch.ones(3), torch.zeros(3)
    for turn in range(dist.get_world_size()):
        dist.all_reduce(mine if turn == dist.get_rank() else zeros)


def taking_turns_with_what_was_chosen_before():
    mine, zeros = torch.ones(3), torch.zeros(3)
    for turn in range(dist.get_world_size()):
        chosen = mine if turn == dist.get_rank() else zeros
        dist.all_reduce(chosen)


def taking_turns_by_a_number_made_of_the_rank():
    me = dist.get_rank()
    side = me % 2
    give, take = torch.ones(3), torch.zeros(3)
    for turn in (0, 1):
        dist.all_reduce(give if turn == side else take)


class Owned:
    def __init__(self, owner):
        self.owner, self.weight, self.padding = owner, torch.ones(3), torch.zeros(3)

    def is_mine(self):
        return self.owner == dist.get_rank()

    def synchronise(self):
        if self.is_mine():
            dist.all_reduce(self.weight)
        else:
            dist.all_reduce(self.padding)


def owners_in_turn():
    for layer in [Owned(owner) for owner in range(dist.get_world_size())]:
        layer.synchronise()


def contribute():
    mine = torch.ones(3)
    dist.all_reduce(mine)


def listen():
    zeros = torch.zeros(3)
    dist.all_reduce(zeros)


def taking_turns_in_two_functions():
    for turn in range(dist.get_world_size()):
        if dist.get_rank() == turn:
            contribute()
        else:
            listen()


def roots_in_turn():
    for root in range(dist.get_world_size()):
        if root == dist.get_rank():
            mine = torch.ones(3)
            dist.broadcast(mine, root)
        else:
            buffer = torch.zeros(3)
            dist.broadcast(buffer, root)


def other_names_once():
    a, b = torch.ones(3), torch.zeros(3)
    dist.all_reduce(a if dist.get_rank() == 0 else b)


def groups_in_another_order():
    """Call the collectives of two groups in another order; each group keeps its own order."""
    groups = [dist.new_group(range(dist.get_world_size())) for _ in range(2)]
    pairs = list(zip((torch.ones(3), torch.zeros(3)), groups, strict=True))
    works = [dist.all_reduce(x, group=g, async_op=True) for x, g in (pairs[::-1] if is_odd() else pairs)]
    for work in works:
        work.wait()


def launch(box):
    dist.all_reduce(box.tensor)


def advance(box):
    launch(box)


def note(box):
    advance(box)


def take(box):
    note(box)


def two_ways_to_one_call_one_of_them_longer():
    for turn in range(4):
        box = SimpleNamespace(tensor=torch.ones(3))
        if is_odd() == bool(turn % 2):
            take(box)
        else:
            note(box)


TWINS = [
    two_ways_to_one_call_one_of_them_longer,
    the_same_order,
    one_collective_from_two_branches,
    taking_turns,
    taking_turns_on_one_line,
    taking_turns_with_what_was_chosen_before,
    taking_turns_by_a_number_made_of_the_rank,
    owners_in_turn,
    taking_turns_in_two_functions,
    roots_in_turn,
    other_names_once,
    groups_in_another_order,
]


@pytest.mark.parametrize("program", TWINS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_only_looks_alike_passes(world, program, world_size):
    assert world.run(program, world_size=world_size) == [None] * world_size
