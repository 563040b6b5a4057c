"""Runs a marked item on ranks: its phases are the same on every world, only the ranks' side differs."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import pytest

from pdlcheck.harness.collection import cases
from pdlcheck.harness.collection.drawn_at_import import warn_of_shared_values
from pdlcheck.harness.running import worlds
from pdlcheck.harness.running.examples import is_property, ranks_receive_examples, refuse_own_fixtures
from pdlcheck.harness.running.folders import clear_shared
from pdlcheck.harness.running.open_worlds import open_worlds

__all__ = ["RankedItem", "call", "finish_ranks", "prepare", "status_of"]

_ranked = pytest.StashKey["RankedItem"]()


class RankedItem(Protocol):
    """The ranks' side of one item."""

    def setup(self) -> None:
        """Set up the fixtures of every rank."""

    def call(self, drawn: dict[str, Any]) -> None:
        """Run the body on every rank, with these arguments besides the fixtures."""

    def teardown(self) -> None:
        """Tear the fixtures down and give the ranks back."""


def prepare(item: pytest.Item) -> None:
    """Put the ranks' set-up in the place of the item's own."""
    assert isinstance(item, pytest.Function)
    if cases.runs_in_a_rank(item.config):
        return
    case = cases.case_of(item)
    assert case is not None
    world = worlds.open_world(item.config, case.world, timed=case.timed)
    if world.shares_process:
        from pdlcheck.harness.running.simulated import SimulatedItem
        from pdlcheck.worlds.simulated import SimulatedWorld

        assert isinstance(world, SimulatedWorld)
        warn_of_shared_values(item, case.world_size)
        ranked: RankedItem = SimulatedItem(item, case, world)
    else:
        from pdlcheck.harness.running.processes import ProcessItem

        ranked = ProcessItem(item, case, world)
    item.stash[_ranked] = ranked
    item.setup = lambda: _setup(item, ranked)  # type: ignore[method-assign]  # pytest calls it by this name


def _setup(item: pytest.Function, ranked: RankedItem) -> None:
    item.addfinalizer(lambda: clear_shared(item))
    item.addfinalizer(ranked.teardown)  # the last comes first
    ranked.setup()


def call(item: pytest.Function) -> None:
    """Run the item's body on its ranks; for a property, once for each example."""
    __tracebackhide__ = True
    ranked = item.stash[_ranked]
    if inspect.iscoroutinefunction(item.obj):
        pytest.fail("the body of an async test cannot run on ranks; write a plain function", pytrace=False)
    if not is_property(item):
        ranked.call({})
        return
    from pdlcheck.harness.reporting.noted import refuse_drawing

    refuse_own_fixtures(item)
    fixtures = {name: _shown(item, name) for name in item._fixtureinfo.argnames}

    def on_ranks(arguments: dict[str, Any]) -> None:
        __tracebackhide__ = True
        drawn = {name: value for name, value in arguments.items() if name not in fixtures}
        for name, value in drawn.items():
            refuse_drawing(name, value)
        ranked.call(drawn)

    with ranks_receive_examples(item, on_ranks):
        item.obj(**fixtures)


def finish_ranks(config: pytest.Config, exitstatus: int) -> None:
    """End the pytest sessions in ranks: what they still have set up is torn down, and the first error raised."""
    for world in open_worlds(config):
        if world.shares_process:
            continue
        from pdlcheck.harness.running.processes import finish

        finish(config, world, exitstatus)


def status_of(end: BaseException) -> int:
    """The exit status of a session that this ends before its last item."""
    if isinstance(end, pytest.exit.Exception) and end.returncode is not None:
        return end.returncode
    return pytest.ExitCode.TESTS_FAILED if isinstance(end, pytest.Session.Failed) else pytest.ExitCode.INTERRUPTED


def _shown(item: pytest.Function, name: str) -> Any:
    """In a falsifying example: the value of a parameter, which is the same on all ranks."""
    definitions = item._fixtureinfo.name2fixturedefs.get(name, ())
    made_by = definitions[-1].func.__module__ if definitions else "_pytest."
    if name in item.callspec.params and made_by.startswith("_pytest."):  # else it is the parameter of a fixture
        return item.callspec.params[name]
    if name == "world_size" and made_by == "pdlcheck.plugin":
        case = cases.case_of(item)
        assert case is not None
        return case.world_size
    return _EachRanksOwn()


class _EachRanksOwn:
    """Stands for a fixture where the controller calls the test: only the ranks have its value."""

    def __repr__(self) -> str:
        return "<each rank's own>"
