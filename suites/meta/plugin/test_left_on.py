"""A mode of torch, or similar state, that a test enters and does not leave has no effect on later tests."""

from __future__ import annotations

import pytest

SOURCE = """
import pytest, torch, torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None): raise RuntimeError("left on")

class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None): raise RuntimeError("left on")

def refuses(tensor): raise RuntimeError("left on")

LEAVES = {
    "dispatch": lambda: Dispatch().__enter__(),
    "function": lambda: Function().__enter__(),
    "two": lambda: (Dispatch().__enter__(), Dispatch().__enter__()),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(refuses, refuses).__enter__(),
    "vmap": lambda: torch._C._functorch._vmap_increment_nesting(3, "error"),
}

@pytest.mark.world_size(2)
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize("which", LEAVES)
@pytest.mark.parametrize("part", ["leaves", "innocent"])
def test_one(rank, part, which, who):
    if part == "leaves" and rank in who:
        LEAVES[which]()
    elif part == "innocent":
        x = torch.ones(1, requires_grad=True)
        (x * x).backward()
        dist.all_reduce(x.detach())
"""
HOLDS = """
import pytest, torch, torch.distributed as dist
seen = []

@pytest.fixture(scope="module")
def hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append("pack") or x, lambda x: x):
        yield

@pytest.mark.world_size(2)
@pytest.mark.parametrize("number", [1, 2])
def test_the_fixture_of_the_file_holds(rank, hooks, number):
    before = len(seen)
    x = torch.ones(1, requires_grad=True)
    (x * x).backward()
    assert len(seen) > before
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sim", "gloo"])
def test_what_is_left_on_is_nothing_to_others(pytester, name):
    others = {"test_holds": HOLDS} if name == "gloo" else {}  # on a process, state that a fixture enters stays
    pytester.makepyfile(test_leaves=SOURCE, **others)
    result = pytester.runpytest_inprocess("--world", name, "-p", "no:randomly", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2 * 5 * 3 + 2 * len(others))
