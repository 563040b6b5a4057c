"""A piece of the process's state is per-rank on simulated ranks if it is a class and a line in the list."""

from __future__ import annotations

import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pdlcheck.errors import RankTimeout
from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated import process_state
from pdlcheck.worlds.simulated.process_state import states
from pdlcheck.worlds.simulated.process_state.protocol import ProcessState, RunState
from pdlcheck.worlds.simulated.process_state.states import STATES, States

PROCESS = SimpleNamespace(unit="controller's")  # an object that a process has once


class Unit(ProcessState):
    """A made-up piece of state."""

    def capture(self):
        return PROCESS.unit

    def apply(self, state):
        PROCESS.unit = state


class UnitOfOneRun(RunState):
    """The same, as a piece that begins anew with each run."""

    def capture(self):
        return PROCESS.unit

    def apply(self, state):
        PROCESS.unit = state

    def begin(self, rank, kept):
        PROCESS.unit = self.start
        return kept


def listed(monkeypatch, *pieces):
    monkeypatch.setattr(states, "STATES", States([*STATES.pieces, *pieces]))


@pytest.fixture(autouse=True)
def _unit(monkeypatch):
    monkeypatch.setattr(PROCESS, "unit", "controller's")


def changed_by_each_rank():
    """Return the units that a rank finds at first, and after other ranks have had their turns."""
    first = PROCESS.unit
    PROCESS.unit = f"of rank {dist.get_rank()}"
    found = []
    for _ in range(3):
        dist.barrier()
        found.append(PROCESS.unit)
    PROCESS.unit += "!"
    return first, *found


def unit():
    return PROCESS.unit


def test_each_rank_finds_its_own_after_each_switch_and_the_controller_has_its_own_again(monkeypatch):
    listed(monkeypatch, Unit())
    for schedule in ("first", "random:1", "random:2"):
        found = get_world("sim", schedule=schedule).run(changed_by_each_rank, world_size=3)
        assert found == [("controller's", *[f"of rank {rank}"] * 3) for rank in range(3)]
        assert PROCESS.unit == "controller's"


def test_a_piece_that_is_not_in_the_list_is_shared():
    found = get_world("sim", schedule="first").run(changed_by_each_rank, world_size=3)
    assert found != [("controller's", *[f"of rank {rank}"] * 3) for rank in range(3)]
    assert PROCESS.unit != "controller's"


def test_a_rank_keeps_its_own_from_run_to_run_until_the_controller_changes_its_state(monkeypatch):
    listed(monkeypatch, Unit())
    with get_world("sim").open(2) as ranks:
        ranks.run(changed_by_each_rank)
        for _ in range(2):
            assert ranks.run(unit) == ["of rank 0!", "of rank 1!"]
            assert PROCESS.unit == "controller's"
        PROCESS.unit = "controller's second"
        assert ranks.run(unit) == ["controller's second"] * 2
        ranks.run(changed_by_each_rank)
        assert ranks.run(unit) == ["of rank 0!", "of rank 1!"]
    with get_world("sim").open(2) as ranks:
        assert ranks.run(unit) == ["controller's second"] * 2


def test_the_state_of_one_rank_can_be_made_that_of_all(monkeypatch):
    listed(monkeypatch, Unit())
    with get_world("sim").open(2) as ranks:
        ranks.run(changed_by_each_rank)
        ranks.give_to_controller(1)
        assert PROCESS.unit == "of rank 1!"
        assert ranks.run(unit) == ["of rank 1!"] * 2


def test_a_piece_of_one_run_is_not_kept_and_not_given(monkeypatch):
    listed(monkeypatch, UnitOfOneRun())
    with get_world("sim").open(2) as ranks:
        for _ in range(2):
            found = ranks.run(changed_by_each_rank)
            assert found == [("controller's", *[f"of rank {rank}"] * 3) for rank in range(2)]
        ranks.give_to_controller(1)
        assert PROCESS.unit == "controller's"


def fails():
    changed_by_each_rank()
    raise ZeroDivisionError


def hangs():
    changed_by_each_rank()
    while True:
        pass


@pytest.mark.parametrize(("body", "error"), [(fails, ZeroDivisionError), (hangs, RankTimeout)])
def test_the_controller_has_its_own_again_after_a_failure(monkeypatch, body, error):
    listed(monkeypatch, Unit())
    with pytest.raises(error):
        get_world("sim", timeout_s=0.5).run(body, world_size=2)
    assert PROCESS.unit == "controller's"
    assert get_world("sim").run(unit, world_size=2) == ["controller's"] * 2


def test_pieces_are_put_in_force_in_the_order_of_the_list_and_captured_in_the_opposite_one(monkeypatch):
    calls = []

    class Noted(RunState):
        def __init__(self, name):
            self.name = name

        def capture(self):
            calls.append(f"capture {self.name}")

        def apply(self, state):
            calls.append(f"apply {self.name}")

    def body():
        if dist.get_rank() == 0:
            calls.clear()  # the controller has called before
        dist.barrier()
        return calls[:]

    listed(monkeypatch, Noted("a"), Noted("b"))
    found = get_world("sim", schedule="first").run(body, world_size=2)[0]
    assert {*zip(found[::2], found[1::2], strict=True)} == {("capture b", "capture a"), ("apply a", "apply b")}


def test_every_piece_in_the_folder_is_in_the_list():
    modules = [
        importlib.import_module(one.name)
        for one in pkgutil.iter_modules(process_state.__path__, f"{process_state.__name__}.")
    ]
    pieces = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and ProcessState in kind.__mro__ and kind not in (ProcessState, RunState)
    }
    assert pieces == {type(piece) for piece in STATES.pieces}
