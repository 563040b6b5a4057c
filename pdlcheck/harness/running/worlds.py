"""The worlds that the session has open. Does not import torch."""

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

TIMED_LIMIT_S = 600.0  # of what is measured
LIMIT_S = 60.0  # of what runs on simulated ranks in one call, as that of processes


def open_world(config: pytest.Config, name: str | None, *, timed: bool = False) -> World:
    """The session's world of that name, opened on first use; a skip that says what is missing where it cannot be.

    ``timed``: what its ranks do is measured. Nothing watches their operations, and a call may take ten minutes.
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
    """Let pytest's outcomes on the ranks of a world, and what these patch, be a rank's, whoever made the world."""
    from unittest import SkipTest  # which is a skip to pytest, too

    from pdlcheck.worlds import outcome

    outcome.lesser[:] = [pytest.xfail.Exception, pytest.skip.Exception, SkipTest]
    if world.shares_process:
        from pdlcheck.harness.running import own_fixtures, own_mocks
        from pdlcheck.worlds.simulated.c10d.view import IN_RANKS

        IN_RANKS.add(*own_fixtures.PATCHES, *own_mocks.PATCHES)
    else:
        from pdlcheck.harness.rank.sent_patches import let_patches_travel

        let_patches_travel()


def warm_up(config: pytest.Config) -> None:
    """While tests are collected, let a fork server import what ranks will need, and launched processes join."""
    if launched.candidate(config) is not None and launched.launch(config) is None:
        return  # it is not decided yet whether this process runs tests on ranks
    if {*world_names(config)} - {"sim"} and not config.getoption("collectonly"):
        from pdlcheck.worlds.processes.controller import forkserver

        own = launched.launch(config)
        rank = None if own is None else own.rank
        forkserver.start(preload=launched.PRELOAD, seed=config.getoption("--pdl-seed"), rank=rank)
    launched.placement(config)


def isolate(item: pytest.Item) -> None:
    """Let the item's world share as much between tests as ``--isolation`` or the marker ``isolation`` says.

    Simulated ranks get the semantics of ``--semantics`` or of the marker ``semantics``; elsewhere a test with the
    marker ``faults`` is skipped.
    """
    name = world_of(item)
    if name is None or runs_in_a_rank(item.config):
        return
    require_faults(item, name)
    mode, case = isolation_of(item), case_of(item)
    world = open_world(item.config, name, timed=case is not None and case.timed)
    if not world.shares_process:  # simulated ranks are new for each test in any case
        world.isolation = mode
    else:
        world.semantics = semantics_of(item)  # type: ignore[attr-defined]  # a simulated world's
        world.measures.forget()  # type: ignore[attr-defined]  # a simulated world's: what it measured is another test's


@contextmanager
def with_faults(item: pytest.Item) -> Iterator[None]:
    """What simulated ranks run in the block suffers the faults of the marker; set-up and tear-down do not."""
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
    """Let those nodes of a launch that do not see this one's disk send what their ranks have measured."""
    own = launched.launch(config)
    worlds = [world for world in open_worlds(config) if not world.shares_process and world.name != "mpi"]
    if own is None or not launched.spans_nodes(config) or not worlds:
        return
    from pdlcheck.harness.rank.coverage import fetch

    try:
        fetch(config, worlds[0], own.world_size)
    except PdlcheckError as error:  # such as a launched process that has gone
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
    return options if name == "mpi" else options | {"placement": launched.placement(config)}
