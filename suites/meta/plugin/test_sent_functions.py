"""Functions that a test sends to ranks rely on what their file did first: its stubs, its environment, its path."""

from __future__ import annotations

import pytest

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
    pytester.runpytest_subprocess("--world", world, "-p", "no:randomly").assert_outcomes(passed=5)
