"""Pytest items on simulated ranks; see :class:`pdlcheck.harness.item_runner.ItemRunner`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdlcheck.harness.collection.cases import Case
from pdlcheck.harness.collection.drawn_at_import import warn_of_shared_values
from pdlcheck.harness.collection.markers import isolation_of, semantics_of
from pdlcheck.harness.item_runner import RankedItem
from pdlcheck.harness.running.time_limits import deadline, read_marker
from pdlcheck.time_budgets import LIMIT_S

if TYPE_CHECKING:
    from pdlcheck.worlds import World
    from pdlcheck.worlds.simulated import SimulatedWorld

__all__ = [
    "adapt",
    "check_options",
    "finish",
    "limited",
    "load",
    "options",
    "prepare",
    "ranked_item",
    "suspend",
    "timed_options",
    "with_faults",
]


def load() -> None:
    """Import the simulated world, and torch with it."""
    import pdlcheck.worlds.simulated  # noqa: F401


def check_options(config: pytest.Config) -> None:
    """Raise a usage error if ``--schedule`` names no schedule."""
    from pdlcheck.worlds.simulated.schedules import schedule_of

    try:
        schedule_of(config.getoption("--pdl-schedule"))
    except ValueError as error:
        raise pytest.UsageError(f"--{error}") from None


def options(config: pytest.Config, name: str) -> Mapping[str, Any]:
    """Return the options of the world."""
    spec = config.getoption("--pdl-schedule")
    schedule = {} if spec is None else {"schedule": spec}
    return schedule | {
        "timeline": config.getoption("--pdl-timeline") is not None,
        "own_globals": config.getini("pdlcheck_own_globals"),
        "timeout_s": LIMIT_S if config.getoption("--pdl-rank-pdb") is None else None,
    }


def timed_options() -> Mapping[str, Any]:
    """Return nothing: simulated ranks are not measured."""
    return {}


def adapt() -> None:
    """Let patches of a program belong to the rank that makes them."""
    from pdlcheck.item_runners.simulated import own_fixtures, own_mocks
    from pdlcheck.worlds.simulated.c10d.install import IN_RANKS

    IN_RANKS.add(*own_fixtures.PATCHES, *own_mocks.PATCHES)


def prepare(item: pytest.Item, world: World) -> None:
    """Set the semantics, and drop another test's measurements; ranks are always new for each test."""
    isolation_of(item)  # it has no effect here, and wrong arguments are named in every world
    simulated = _simulated(world)
    simulated.semantics = semantics_of(item)
    simulated.measures.forget()


def suspend(world: World) -> None:
    """Take back what simulated ranks exchange in this process."""
    _simulated(world).suspend()


@contextmanager
def limited(item: pytest.Item, world: World) -> Iterator[None]:
    """Limit the runs of the block to the time that the item has left."""
    read_marker(item)
    simulated = _simulated(world)
    simulated.until = deadline(item)
    try:
        yield
    finally:
        simulated.until = None


@contextmanager
def with_faults(world: World, faults: Sequence[Any]) -> Iterator[None]:
    """Inject the faults into the runs of the block; fail the test if it runs nothing."""
    __tracebackhide__ = True
    simulated = _simulated(world)
    simulated.faults = tuple(faults)
    runs = simulated.measures.runs
    try:
        yield
    finally:
        simulated.faults = ()
    if simulated.measures.runs == runs:
        pytest.fail("the test is marked faults and ran nothing on its world, so none was injected", pytrace=False)


def ranked_item(item: pytest.Function, case: Case, world: World) -> RankedItem:
    """Return the ranks' side of an item."""
    from pdlcheck.item_runners.simulated.items import SimulatedItem
    from pdlcheck.worlds.simulated.module_globals.own_draws import modules_that_draw

    simulated = _simulated(world)
    if not modules_that_draw(simulated.own_globals, str(item.path)):  # of these each rank draws its own
        warn_of_shared_values(item, case.world_size)
    return SimulatedItem(item, case, simulated)


def finish(config: pytest.Config, world: World, exitstatus: int) -> None:
    """Do nothing: simulated ranks keep nothing from item to item."""


def _simulated(world: World) -> SimulatedWorld:
    return cast("SimulatedWorld", world)
