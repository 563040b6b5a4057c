"""Which world and world size a test runs on, and the worlds that the session has open. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.errors import PdlcheckError, WorldTooSmall, WorldUnavailable
from pdlcheck.faults import Slow
from pdlcheck.harness.running import launched
from pdlcheck.worlds import WORLDS
from pdlcheck.worlds.arguments import ISOLATIONS, check_faults
from pdlcheck.worlds.semantics import Semantics, make_semantics

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pdlcheck.worlds import World

__all__ = [
    "Case",
    "RankContext",
    "bring_coverage",
    "case_of",
    "check_options",
    "close_worlds",
    "given_to",
    "is_our_world",
    "isolate",
    "leave_rank_context",
    "look_after",
    "open_world",
    "open_worlds",
    "plain_skips",
    "rank_context",
    "require_ranks",
    "runs_in_a_rank",
    "semantics_of",
    "set_rank_context",
    "sets_up_for_all",
    "too_few_ranks_skip",
    "warm_up",
    "with_faults",
    "world_names",
    "world_of",
]

_LIMIT_S = 60.0  # of what runs on simulated ranks in one call, as that of processes
CASE = "pdlcheck_case"  # the hidden argument by which a test is repeated

_open: pytest.StashKey[dict[str, World]] = pytest.StashKey()
_context: RankContext | None = None
IN_RANK = pytest.StashKey[bool]()


@dataclass(frozen=True)
class Case:
    """One world and one number of ranks."""

    world: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.world}-{self.world_size}"


@dataclass(frozen=True)
class RankContext:
    """What the fixtures ``rank``, ``world_size``, ``device`` and ``group`` return while one rank is being set up."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    in_body: bool = False  # of the test, which may ask for fixtures
    for_all: Callable[[], bool] = lambda: True  # whether the fixture that is set up is one that all ranks share


def world_names(config: pytest.Config) -> list[str]:
    """The worlds of ``--world``, in order; by default the simulated one, under a launcher the launched processes."""
    names = config.getoption("--world")
    if names is None:
        names = "sim" if launched.launch(config) is None else "gloo"
    return [name.strip() for name in names.split(",") if name.strip()]


def check_options(config: pytest.Config) -> None:
    """Stop with a usage error where an option cannot be meant."""
    names = world_names(config)
    config.option.world = ",".join(names)  # the ranks' own sessions are under no launcher
    for name in names or [""]:
        if name not in WORLDS:
            raise pytest.UsageError(f"--world must name some of {', '.join(sorted(WORLDS))}; got {name!r}")
    if getattr(config.option, "update_snapshots", False) and {*names} - {"sim"}:
        raise pytest.UsageError(
            "--snapshot-update with a world other than sim: syrupy does not see what ranks in processes compare, "
            "writes none of it, and would delete what it has of them; update with --world sim"
        )
    rank = config.getoption("--rank-pdb")
    if rank is not None and rank < 0:
        raise pytest.UsageError(f"--rank-pdb takes the number of a rank, from 0 on; got {rank}")
    if rank is not None and (hasattr(config, "workerinput") or config.getoption("numprocesses", None)):
        raise pytest.UsageError("--rank-pdb needs the terminal, which workers of pytest-xdist do not have; use -n 0")
    own = launched.launch(config)
    if rank is not None and own is not None and rank >= (own.local_world_size or own.world_size):
        raise pytest.UsageError(
            f"--rank-pdb {rank}: the terminal is that of rank 0, on whose node {own.local_world_size} of "
            f"{own.world_size} ranks are; take one of these, or launch on one node"
        )
    if (spec := config.getoption("--schedule")) is not None:
        from pdlcheck.worlds.simulated.schedules import schedule_of

        try:
            schedule_of(spec)
        except ValueError as error:
            raise pytest.UsageError(f"--{error}") from None
    for text in config.getoption("--subject"):
        name, _, target = text.partition("=")
        if not (name and target.count(":") == 1):
            raise pytest.UsageError(f"--subject takes NAME=MODULE:FUNCTION; got {text!r}")


def case_of(item: pytest.Item) -> Case | None:
    """The world and world size on whose ranks the body of this item runs, if it does."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(CASE)


def world_of(item: pytest.Item) -> str | None:
    """The name of the world that this item runs on; None where it runs on none."""
    case, callspec = case_of(item), getattr(item, "callspec", None)
    if case is not None:
        return case.world
    info: Any = getattr(item, "_fixtureinfo", None)
    name: str | None = None if callspec is None else callspec.params.get("world")
    return name if name is not None and is_our_world(info.name2fixturedefs) else None


def is_our_world(definitions: Mapping[str, Sequence[Any]]) -> bool:
    """Is ``world``, as those who ask get it, the plugin's fixture, and no parameter or fixture of the user's?"""
    found = definitions.get("world") or ()
    return bool(found) and found[-1].func.__module__ == "pdlcheck.plugin"


def require_ranks(item: pytest.Item) -> None:
    """Fail a marked test that pytest does not let us repeat: it would pass without ever having had ranks.

    Doctests cannot be marked: a marker of their module is about its test functions.
    """
    if isinstance(item, pytest.DoctestItem):
        return
    if item.get_closest_marker("world_size") is not None and case_of(item) is None:
        pytest.fail(
            "world_size marks test functions, methods and single parameters of these, before they are collected",
            pytrace=False,
        )
    if item.get_closest_marker("faults") and world_of(item) is None and not runs_in_a_rank(item.config):
        pytest.fail("faults happen to ranks: mark the test world_size, or let it use the fixture world", pytrace=False)


@contextmanager
def plain_skips() -> Iterator[None]:
    """A skip that comes from ranks gives its reason alone, without their story."""
    __tracebackhide__ = True
    try:
        yield
    except pytest.skip.Exception as skip:
        if story := getattr(skip, "__notes__", None):
            story.clear()
            skip._use_item_location = True  # the rank's own lines do not reach the controller
        raise


@contextmanager
def too_few_ranks_skip(item: pytest.Item) -> Iterator[None]:
    """A test that needs more ranks than a launch has is skipped, and says so; of a property, the first such example."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        if isinstance(error, WorldTooSmall):
            from pdlcheck.harness.running.examples import is_property

            words = f"an example {error}; others may need more" if is_property(item) else str(error)
            raise pytest.skip.Exception(words, _use_item_location=True) from None
        raise


def isolate(item: pytest.Item) -> None:
    """Let the item's world share as much between tests as ``--isolation`` or the marker ``isolation`` says.

    Simulated ranks get the semantics of ``--semantics`` or of the marker ``semantics``; elsewhere a test with the
    marker ``faults`` is skipped.
    """
    name = world_of(item)
    if name is None or runs_in_a_rank(item.config):
        return
    _check_faults(item, name)
    mode = _isolation_of(item)
    world = open_world(item.config, name)
    if not world.shares_process:  # simulated ranks are new for each test in any case
        world.isolation = mode
    else:
        world.semantics = semantics_of(item)  # type: ignore[attr-defined]  # a simulated world's
        world.measures.forget()  # type: ignore[attr-defined]  # a simulated world's: what it measured is another test's


def _isolation_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("isolation")
    if marker is None:
        return str(item.config.getoption("--isolation"))
    if len(marker.args) == 1 and not marker.kwargs and marker.args[0] in ISOLATIONS:
        return str(marker.args[0])
    words = f"isolation takes one of {', '.join(ISOLATIONS)}, such as isolation('fresh'); got {given_to(marker)}"
    pytest.fail(f"{item.nodeid}: {words}", pytrace=False)


def given_to(marker: pytest.Mark) -> str:
    """In words: the arguments of a marker."""
    arguments = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return ", ".join(arguments) or "none"


def semantics_of(item: pytest.Item) -> Semantics:
    """Of the marker, or else of the option; fails the item whose marker is wrong."""
    marker, profile = item.get_closest_marker("semantics"), item.config.getoption("--semantics")
    try:
        arguments = (marker.args or (profile,), marker.kwargs) if marker else ((profile,), {})
        return make_semantics(*arguments[0], **arguments[1])
    except (TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None


def _check_faults(item: pytest.Item, world_name: str) -> None:
    marker, case = item.get_closest_marker("faults"), case_of(item)
    if marker is None:
        return
    try:
        if marker.kwargs or not marker.args:
            raise ValueError(f"faults takes faults by position, such as Kill(1, 3); got {given_to(marker)}")
        check_faults(marker.args, None if case is None else case.world_size)
        for slow in (fault for fault in marker.args if isinstance(fault, Slow)):
            raise ValueError(
                f"{slow} shows in times alone, which pytest's worlds do not keep; in the test, run "
                f'get_world("sim", topology=Topology(intra=Link(...)), faults=[{slow}]) and look at its timeline'
            )
    except ValueError as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None
    if world_name != "sim":
        reason = f"faults are injected on the world sim alone, not on {world_name}"
        raise pytest.skip.Exception(reason, _use_item_location=True)


@contextmanager
def with_faults(item: pytest.Item) -> Iterator[None]:
    """What simulated ranks run in the block suffers the faults of the marker; set-up and tear-down do not."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("faults")
    if marker is None or runs_in_a_rank(item.config):
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


def runs_in_a_rank(config: pytest.Config) -> bool:
    """True in the pytest session that a rank process keeps."""
    return config.stash.get(IN_RANK, False)


def open_world(config: pytest.Config, name: str | None) -> World:
    """The session's world of that name, opened on first use; a skip that says what is missing where it cannot be."""
    from pdlcheck.worlds import get_world

    name = name or world_names(config)[0]
    worlds = config.stash.setdefault(_open, {})
    if name not in worlds:
        device, seed = config.getoption("--rank-device"), config.getoption("--pdl-seed")
        try:
            world = get_world(name, device=device, seed=seed, **_options(config, name))
            world.check()
        except WorldUnavailable as missing:
            raise pytest.skip.Exception(str(missing), _use_item_location=True) from None
        worlds[name] = world
    return worlds[name]


def look_after(world: World) -> None:
    """Let pytest's outcomes on the ranks of a world, and what these patch, be a rank's, whoever made the world."""
    from pdlcheck.worlds import outcome

    outcome.lesser[:] = [pytest.xfail.Exception, pytest.skip.Exception]
    if world.shares_process:
        from pdlcheck.harness.running.own_fixtures import follow_patches
        from pdlcheck.harness.running.own_mocks import follow_mocks

        follow_patches()
        follow_mocks()


def _options(config: pytest.Config, name: str) -> dict[str, Any]:
    if name == "sim":
        spec = config.getoption("--schedule")
        timeline, own = config.getoption("--timeline") is not None, config.getini("pdlcheck_own_globals")
        limit = _LIMIT_S if config.getoption("--rank-pdb") is None else None
        options: dict[str, Any] = {"timeline": timeline, "own_globals": own, "timeout_s": limit}
        return options if spec is None else options | {"schedule": spec}
    from pdlcheck.harness.running.preparation import options_of_processes

    options = options_of_processes(config)
    return options if name == "mpi" else options | {"placement": launched.placement(config)}


def warm_up(config: pytest.Config) -> None:
    """While tests are collected, let a fork server import what ranks will need, and launched processes join."""
    if {*world_names(config)} - {"sim"} and not config.getoption("collectonly"):
        from pdlcheck.worlds.processes.controller import forkserver

        forkserver.start(preload=launched.PRELOAD)
    launched.placement(config)


def close_worlds(config: pytest.Config) -> None:
    """Give back what the worlds of the session hold."""
    for world in open_worlds(config):
        world.close()


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


def open_worlds(config: pytest.Config) -> list[World]:
    """The worlds that tests have used so far."""
    return list(config.stash.get(_open, {}).values())


def set_rank_context(context: RankContext | None) -> None:
    """Say which rank the rank fixtures speak of."""
    global _context
    _context = context


def leave_rank_context(context: RankContext) -> None:
    """Say that no rank is meant, unless another one is by now: a rank that was left behind may end late."""
    if _context is context:
        set_rank_context(None)


def sets_up_for_all() -> bool:
    """True while a fixture that all simulated ranks share is set up or torn down."""
    return _context is not None and not _context.in_body and _context.for_all()


def rank_context(fixture: str) -> RankContext:
    """What the rank fixtures return now; only the items whose body runs on ranks have one."""
    __tracebackhide__ = True
    if _context is None:
        raise pytest.UsageError(
            f"fixture {fixture!r} belongs to a rank: mark the test with @pytest.mark.world_size(2), "
            "or use the fixture 'world' and its run()"
        )
    return _context
