"""The phases of a marked item on ranks: the same on every world, except for the ranks' side."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pdlcheck.compat.pytest.fixtures import argument_names, definitions_of, is_direct_parameter
from pdlcheck.harness.collection import cases
from pdlcheck.harness.collection.plugin_fixtures import is_ours
from pdlcheck.harness.item_runner import RankedItem, runner_of
from pdlcheck.harness.running import worlds
from pdlcheck.harness.running.examples import is_property, ranks_receive_examples, refuse_drawing, refuse_own_fixtures
from pdlcheck.harness.running.folders import clear_shared
from pdlcheck.harness.running.open_worlds import open_worlds

__all__ = ["call", "finish_ranks", "prepare", "status_of"]

_ranked = pytest.StashKey["RankedItem"]()


def prepare(item: pytest.Item) -> None:
    """Replace the item's own set-up by the set-up of its ranks."""
    assert isinstance(item, pytest.Function)
    if cases.runs_in_a_rank(item.config):
        return
    case = cases.case_of(item)
    assert case is not None
    world = worlds.open_world(item.config, case.world, timed=case.timed)
    ranked = runner_of(world).ranked_item(item, case, world)
    item.stash[_ranked] = ranked
    item.setup = lambda: _setup(item, ranked)  # type: ignore[method-assign]  # pytest calls it by this name


def _setup(item: pytest.Function, ranked: RankedItem) -> None:
    item.addfinalizer(lambda: clear_shared(item))
    item.addfinalizer(ranked.teardown)  # finalizers run in reverse order
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
    refuse_own_fixtures(item)
    fixtures = {name: _shown(item, name) for name in argument_names(item)}

    def on_ranks(arguments: dict[str, Any]) -> None:
        __tracebackhide__ = True
        drawn = {name: value for name, value in arguments.items() if name not in fixtures}
        for name, value in drawn.items():
            refuse_drawing(name, value)
        ranked.call(drawn)

    with ranks_receive_examples(item, on_ranks):
        item.obj(**fixtures)


def finish_ranks(config: pytest.Config, exitstatus: int) -> None:
    """End the pytest sessions in ranks: tear down what is still set up, and raise the first error."""
    for world in open_worlds(config):
        runner_of(world).finish(config, world, exitstatus)


def status_of(end: BaseException) -> int:
    """Return the exit status of a session that this exception ends before its last item."""
    if isinstance(end, pytest.exit.Exception) and end.returncode is not None:
        return end.returncode
    return pytest.ExitCode.TESTS_FAILED if isinstance(end, pytest.Session.Failed) else pytest.ExitCode.INTERRUPTED


def _shown(item: pytest.Function, name: str) -> Any:
    """Return a fixture's value for a falsifying example, if all ranks have the same; otherwise a placeholder."""
    definitions = definitions_of(item).get(name)
    used = definitions[-1] if definitions else None
    # A parameter of a fixture is not the fixture's value.
    if name in item.callspec.params and (used is None or is_direct_parameter(used)):
        return item.callspec.params[name]
    if name == "world_size" and used is not None and is_ours(used):
        case = cases.case_of(item)
        assert case is not None
        return case.world_size
    return _EachRanksOwn()


class _EachRanksOwn:
    """A placeholder for a fixture when the controller calls the test; only the ranks have its value."""

    def __repr__(self) -> str:
        return "<each rank's own>"
