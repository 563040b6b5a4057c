"""Functions that are typed into a session run on ranks: at Python's prompt, and in notebook cells."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from ..clone import ROOT
from ..launched.test_launched import outside

CELLS = """
import torch, torch.distributed as dist
from pdlcheck.worlds import get_world
world = get_world(WORLD)

class Box:
    def __init__(self, x):
        self.x = x
    def total(self):
        dist.all_reduce(self.x)
        return self

def scaled(x, by):
    return by * x

offset = torch.tensor([1.0])

def total(box, by=1):
    return scaled(box.total().x + offset, by).item()

print("of __main__:", world.run(total, Box(torch.ones(1)), world_size=2))

def scaled(x, by):
    return 10 * by * x

offset = 2 * offset

print("what it calls is another:", world.run(total, Box(torch.ones(1)), by=2, world_size=2))

def total(box):
    return dist.get_rank(), box

print("it is another:", world.run(total, "box", world_size=2))

factor = 3

print("a lambda:", world.run(lambda x: factor * x + dist.get_rank(), 5, world_size=2))

factor = 4

def maker(k):
    def inner(x):
        return k * x + factor
    return inner

print("a closure:", world.run(maker(7), 5, world_size=3))

boxes = world.run(Box, 1, world_size=2)

print("a class:", [type(box) is Box and box.x for box in boxes])

class Box:
    def __init__(self, x):
        self.y = x

print("another class:", [type(box) is Box and box.y for box in world.run(Box, 2, world_size=2)])

def wrong():
    if dist.get_rank() == 1:
        raise ValueError("wrong on one")
    dist.barrier()

world.run(wrong, world_size=2)

print("after an error:", world.run(total, None, world_size=2))
"""

PRINTED = """\
of __main__: [3.0, 3.0]
what it calls is another: [80.0, 80.0]
it is another: [(0, 'box'), (1, 'box')]
a lambda: [15, 16]
a closure: [39, 39, 39]
a class: [1, 1]
another class: [2, 2]
after an error: [(0, None), (1, None)]
"""

# As in IPython: a new module is __main__, each cell is compiled under its own name, an error ends only its cell.
NOTEBOOK = """
import linecache, sys, traceback, types
module = sys.modules["__main__"] = types.ModuleType("__main__")
for number, cell in enumerate(sys.stdin.read().split("\\n\\n")):
    name = f"<ipython-input-{number}-0123456789ab>"
    linecache.cache[name] = len(cell), None, cell.splitlines(True), name
    try:
        exec(compile(cell, name, "exec"), module.__dict__)
    except Exception:
        traceback.print_exc()
"""


@pytest.mark.slow
@pytest.mark.parametrize("world_name", ["sim", "gloo"])
@pytest.mark.parametrize("command", [["-q", "-i"], ["-c", NOTEBOOK]], ids=["prompt", "notebook"])
def test_a_session_goes_on_with_what_was_typed_last(tmp_path, world_name, command):
    done = subprocess.run(
        [sys.executable, *command],
        input=CELLS.replace("WORLD", repr(world_name)),
        cwd=tmp_path,
        env=outside() | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == PRINTED, done.stderr
    assert done.returncode == 0
    assert done.stderr.count("Traceback") <= 2  # the controller's, and the rank's
    assert "ValueError: wrong on one\nrank 1 of 2 raised this\nrank 0 was stopped in barrier" in done.stderr
    name = "<stdin>" if command[-1] == "-i" else "<ipython-input-"
    assert f'File "{name}' in done.stderr


@pytest.mark.slow
def test_a_program_that_is_piped_in_has_functions_too():
    program = """
        import torch.distributed as dist
        from pdlcheck.worlds import get_world
        def rank(): return dist.get_rank()
        print([get_world(name).run(rank, world_size=2) for name in ("sim", "gloo")])
    """
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(program),
        env=outside() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[[0, 1], [0, 1]]\n", "")
