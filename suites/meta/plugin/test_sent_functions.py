"""Functions that a test sends to ranks depend on earlier effects of their file: its stubs, environment and path."""

from __future__ import annotations

import pytest

from ..needs_mpi import needs_mpi

USES_A_STUB = """
import absent_package

class Thing:
    number = absent_package.NUMBER
"""

TESTS = """
import os, sys, types
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "lib"))
stub = types.ModuleType("absent_package")
stub.NUMBER = 3
sys.modules.setdefault("absent_package", stub)
os.environ["OF_THE_FILE"] = "set"

import torch
from uses_a_stub import Thing
from pdlcheck.checks import check_same_start

def number(): return Thing.number, os.environ["OF_THE_FILE"]

def made():
    def run(): return Thing.number
    return run

class Doubled:
    def __call__(self): return 2 * Thing.number

def call(fn): return fn()

def test_check(world):
    def make():
        torch.manual_seed(0)
        return torch.nn.Linear(Thing.number, 1)
    check_same_start(make, world)

def test_function(world): assert world.run(number, world_size=2) == [(3, "set")] * 2
def test_closure(world): assert world.run(made(), world_size=2) == [3, 3]
def test_instance(world): assert world.run(Doubled(), world_size=2) == [6, 6]
def test_nested(world): assert world.run(call, made(), world_size=2) == [3, 3]
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_the_file_of_a_function_is_imported_first_wherever_the_function_travels(pytester, world):
    (pytester.mkdir("lib") / "uses_a_stub.py").write_text(USES_A_STUB)
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess("--world", world, "-p", "no:randomly").assert_outcomes(passed=5)


IN_A_FOLDER = """
import pytest, torch.distributed as dist

class Held:
    def __init__(self): self.rank = dist.get_rank()

def own(): return dist.get_rank()

def test_function(world): assert world.run(own, world_size=2) == [0, 1]

def test_class(world):
    results = world.run(Held, world_size=2)
    assert [type(one) for one in results] == [Held] * 2
    assert [one.rank for one in results] == [0, 1]

@pytest.mark.world_size(2)
def test_body(rank): assert own() == rank

def test_function_again(world): assert world.run(own, world_size=2) == [0, 1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", ["sim", "gloo", pytest.param("mpi", marks=needs_mpi)])
def test_files_in_folders_are_imported_where_imports_do_not_find_them(pytester, world):
    folders = {"tests/plain": False, "tests/other": False, "tests/package": True, "whole": True, "whole/inner": True}
    for folder, is_package in folders.items():
        path = pytester.path / folder
        path.mkdir(parents=True)
        (path / "test_same.py").write_text(IN_A_FOLDER)
        if is_package:
            (path / "__init__.py").write_text("def above(): return 7")
    (pytester.path / "whole" / "test_above.py").write_text(
        "from . import above\ndef test_above(world): assert world.run(above, world_size=2) == [7, 7]"
    )
    result = pytester.runpytest_inprocess("--world", world, "-p", "no:randomly", "--import-mode=importlib")
    result.assert_outcomes(passed=4 * len(folders) + 1)
