"""A controller's ``monkeypatch`` that a function uses on ranks: each rank has its own, which ends with the function."""

from __future__ import annotations

import pytest

from ..conftest import HEAD

SETS = """
import json

def sets(patches):
    calls = []
    patches.setattr(json, "dumps", lambda *_: calls.append(1))
    patches.setenv("MINE", str(dist.get_rank()))
    dist.barrier()
    json.dumps(1)
    assert (len(calls), os.environ["MINE"]) == (1, str(dist.get_rank()))
    patches.undo()
    assert json.dumps(1) == "1"
    patches.setattr(json, "dumps", None)

def nothing_is_left(world):
    assert json.dumps(1) == "1"
    left = world.run(lambda: (json.dumps(1), "MINE" in os.environ), world_size=2)
    assert left == [("1", False)] * 2
"""
WAYS = {
    "argument": "def test_it(world, monkeypatch): world.run(sets, monkeypatch, world_size=2)",
    "attribute": """
class Holder: pass

def test_it(world, monkeypatch):
    holder = Holder()
    holder.patches = monkeypatch
    world.run(lambda one: sets(one.patches), holder, world_size=2)
""",
    "closure": "def test_it(world, monkeypatch): world.run(lambda: sets(monkeypatch), world_size=2)",
    "of what the test has set": """
def test_it(world, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    world.run(sets, monkeypatch, world_size=2)
    assert json.loads is None
    monkeypatch.undo()
    assert json.loads("1") == 1
""",
    "wider fixture": """
@pytest.fixture(scope="module")
def patches():
    with pytest.MonkeyPatch.context() as patches:
        yield patches

def test_it(world, patches): world.run(sets, patches, world_size=2)
""",
    "function that fails": """
def fails(patches):
    sets(patches)
    raise KeyError("mine")

def test_it(world, monkeypatch):
    with pytest.raises(KeyError):
        world.run(fails, monkeypatch, world_size=2)
""",
}


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_it_is_each_ranks_own_until_the_function_ends(run, pytester, world):
    for number, body in enumerate(WAYS.values()):
        source = f"{HEAD}{SETS}{body}\ndef test_left(world): nothing_is_left(world)\n"
        pytester.makepyfile(**{f"test_{number}": source})
    result = run("def test_alone(): pass", world=world)
    result.assert_outcomes(passed=2 * len(WAYS) + 1)


def test_a_patch_that_the_user_makes_on_a_process_is_theirs(run):
    """A patch without an undo holds in the next function too, as in any process."""
    run(
        """
import json

def sets(): pytest.MonkeyPatch().setattr(json, "dumps", None)

def test_it(world):
    world.run(sets, world_size=2)
    assert world.run(lambda: json.dumps is None, world_size=2) == [True, True]
"""
    ).assert_outcomes(passed=1)
