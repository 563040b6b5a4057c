"""The worlds of the session: opened on first use, and set up for each test. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.errors import PdlcheckError, WorldUnavailable
from pdlcheck.harness.collection.cases import case_of, runs_in_a_rank, world_names, world_of
from pdlcheck.harness.collection.cuda_as_cpu import runs_cuda_as_cpu
from pdlcheck.harness.collection.markers import isolation_of, require_faults, semantics_of
from pdlcheck.harness.running import launched
from pdlcheck.harness.running.open_worlds import open_worlds, worlds_by_name
from pdlcheck.harness.running.skips import skip_or_fail

if TYPE_CHECKING:
    from pdlcheck.worlds import World

__all__ = [
    "LIMIT_S",
    "bring_coverage",
    "isolate",
    "look_after",
    "open_world",
    "warm_up",
    "with_faults",
]

TIMED_LIMIT_S = 600.0  # for a call whose ranks are timed
LIMIT_S = 60.0  # for one call on simulated ranks, the same as on processes


def open_world(config: pytest.Config, name: str | None, *, timed: bool = False) -> World:
    """Return the session's world of that name, opened on first use; raise a skip if this machine cannot run it.

    Args:
        config: configuration of the session.
        name: name of the world; None is the first world of ``--world``.
        timed: the ranks are measured: their operations are not watched, and a call may take ten minutes.
    """
    from pdlcheck.worlds import get_world

    name = name or world_names(config)[0]
    worlds, key = worlds_by_name(config), f"{name}, timed" if timed and name != "sim" else name
    if key not in worlds:
        device, seed = config.getoption("--pdl-rank-device"), config.getoption("--pdl-seed")
        try:
            cuda = {"cuda_as_cpu": True} if runs_cuda_as_cpu(config) else {}
            unwatched = {"watch": False, "take_turns": True, "timeout_s": TIMED_LIMIT_S} if key != name else {}
            world = get_world(name, device=device, seed=seed, **cuda, **_options(config, name), **unwatched)
            world.check()
        except WorldUnavailable as missing:
            raise skip_or_fail(config, str(missing)) from None
        worlds[key] = world
    return worlds[key]


def look_after(world: World) -> None:
    """Adapt a new world to pytest: skips rank below failures, and patches belong to the rank that makes them."""
    from unittest import SkipTest  # pytest treats it as a skip too

    from pdlcheck.worlds import outcome

    outcome.lesser[:] = [pytest.xfail.Exception, pytest.skip.Exception, SkipTest]
    if world.shares_process:
        from pdlcheck.harness.running import own_fixtures, own_mocks
        from pdlcheck.worlds.simulated.c10d.install import IN_RANKS

        IN_RANKS.add(*own_fixtures.PATCHES, *own_mocks.PATCHES)
    else:
        from pdlcheck.harness.rank.sent_patches import let_patches_travel

        let_patches_travel()


def warm_up(config: pytest.Config) -> None:
    """Let a fork server import what ranks will need, and let launched processes join, while tests are collected."""
    if launched.candidate(config) is not None and launched.launch(config) is None:
        return  # whether this process runs tests on ranks is decided later
    if {*world_names(config)} - {"sim"} and not config.getoption("collectonly"):
        from pdlcheck.worlds.processes.controller import forkserver

        own = launched.launch(config)
        rank = None if own is None else own.rank
        forkserver.start(preload=launched.PRELOAD, seed=config.getoption("--pdl-seed"), rank=rank)
    launched.placement(config)


def isolate(item: pytest.Item) -> None:
    """Set how much the item's world shares between tests, from ``--isolation`` or the marker ``isolation``.

    Simulated ranks get the semantics of ``--semantics`` or of the marker ``semantics``. On other worlds, a test with
    the marker ``faults`` is skipped.
    """
    name = world_of(item)
    if name is None or runs_in_a_rank(item.config):
        return
    require_faults(item, name)
    mode, case = isolation_of(item), case_of(item)
    world = open_world(item.config, name, timed=case is not None and case.timed)
    if not world.shares_process:  # simulated ranks are always new for each test
        world.isolation = mode
    else:
        world.semantics = semantics_of(item)  # type: ignore[attr-defined]  # a simulated world's
        world.measures.forget()  # type: ignore[attr-defined]  # drop another test's measurements


@contextmanager
def with_faults(item: pytest.Item) -> Iterator[None]:
    """Inject the faults of the marker into the runs of simulated ranks in the block; not into set-up and teardown."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("faults")
    if marker is None or world_of(item) is None or runs_in_a_rank(item.config):
        yield
        return
    world: Any = open_world(item.config, "sim")
    world.faults = marker.args
    runs = world.measures.runs
    try:
        yield
    finally:
        world.faults = ()
    if world.measures.runs == runs:
        pytest.fail("the test is marked faults and ran nothing on its world: nobody suffered them", pytrace=False)


def bring_coverage(config: pytest.Config) -> None:
    """Fetch the coverage data of ranks on nodes of a launch that do not share this node's disk."""
    own = launched.launch(config)
    worlds = [world for world in open_worlds(config) if not world.shares_process and world.name != "mpi"]
    if own is None or not launched.spans_nodes(config) or not worlds:
        return
    from pdlcheck.harness.rank.coverage import fetch

    try:
        fetch(config, worlds[0], own.world_size)
    except PdlcheckError as error:  # for example, a launched process has ended
        config.issue_config_time_warning(
            pytest.PytestWarning(f"what ran on other nodes is not in the report of coverage: {error}"), stacklevel=1
        )
    worlds[0].close()


def _options(config: pytest.Config, name: str) -> dict[str, Any]:
    wrappers = {"comm_wrappers": config.getini("pdlcheck_comm_wrappers")}
    if name == "sim":
        spec = config.getoption("--pdl-schedule")
        timeline, own = config.getoption("--pdl-timeline") is not None, config.getini("pdlcheck_own_globals")
        limit = LIMIT_S if config.getoption("--pdl-rank-pdb") is None else None
        options: dict[str, Any] = {"timeline": timeline, "own_globals": own, "timeout_s": limit, **wrappers}
        return options if spec is None else options | {"schedule": spec}
    from pdlcheck.harness.running.preparation import options_of_processes

    options = options_of_processes(config) | wrappers
    from pdlcheck.worlds.backends import BACKENDS

    place = launched.placement(config) if name in BACKENDS and name != "mpi" else None
    return options if place is None else options | {"placement": place}
