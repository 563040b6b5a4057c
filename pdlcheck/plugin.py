"""The pytest plugin: its hooks, options and fixtures.

The implementation is in ``pdlcheck.harness``. torch and most of ``pdlcheck.harness`` are imported inside of functions:
a session whose tests have no ranks pays only for the imports at the top of this file.

Write a test whose body runs on every rank::

    @pytest.mark.world_size(2, 4)
    def test_sum(rank, world_size):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        assert x.item() == world_size * (world_size + 1) / 2

or one with a single controller::

    def test_sum(world):
        assert world.run(total, world_size=4) == [10.0] * 4
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import pytest

from pdlcheck.compat.pytest.collection import parameter_sets
from pdlcheck.harness.collection import (
    cases,
    drawn_at_import,
    marker_ownership,
    option_checks,
    options,
    plugin_fixtures,
)
from pdlcheck.harness.running.open_worlds import close_worlds
from pdlcheck.item_runners import item_hooks
from pdlcheck.launch.traces import has_traces
from pdlcheck.worlds.registry import when_made

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pdlcheck.item_runners.rank_benchmark import RankBenchmark
    from pdlcheck.worlds import World


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options, and register the plugins whose hooks a session may need."""
    options.add_options(parser)
    pluginmanager.register(item_hooks, item_hooks.NAME)
    if has_traces(os.environ):
        from pdlcheck.harness.collection import launch
        from pdlcheck.item_runners.launched import hooks as launch_hooks

        pluginmanager.register(launch_hooks, launch.HOOKS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Replace our short names of options, such as ``--world``, by the full ones."""
    if not options.has_short_names(args):
        return (yield)
    from pdlcheck.harness.collection import short_names

    return (yield from short_names.replace_short_names(early_config, parser, args))


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, check the options, and register what the options need."""
    marker_ownership.register(config)
    marker_ownership.note_what_was_asked(config)
    option_checks.check_options(config)
    when_made(_look_after)
    if "," in config.option.pdl_world:
        from pdlcheck.item_runners.simulated import world_disagreement

        if world_disagreement.compares_worlds(config):
            config.pluginmanager.register(
                world_disagreement.Differing(config), "pdlcheck.item_runners.simulated.world_disagreement"
            )
    if config.option.pdl_json is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.json_records import JsonRecords

        records = JsonRecords(config.option.pdl_json, is_worker=hasattr(config, "workerinput"))
        config.pluginmanager.register(records, "pdlcheck.harness.reporting.json_records")
    if config.option.pdl_github and not hasattr(config, "workerinput") and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.github_annotations import GithubAnnotations

        config.pluginmanager.register(GithubAnnotations(config), "pdlcheck.harness.reporting.github_annotations")
    if config.getoption("--pdl-rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.item_runners.simulated.debugging import debug_simulated

        debug_simulated(config, config.getoption("--pdl-rank-pdb"))


def _look_after(world: World) -> None:
    from pdlcheck.harness.running.worlds import look_after

    look_after(world)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Order the fixtures among those of other plugins, and start preparing process worlds while pytest collects."""
    plugin_fixtures.give_way_to_other_plugins(session)
    if session.config.option.pdl_world != "sim":
        from pdlcheck.item_runners.processes.warm_up import warm_up

        warm_up(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Raise a usage error if no collected test has the rank of ``--rank-pdb``."""
    if session.config.option.pdl_rank_pdb is not None and not cases.runs_in_a_rank(session.config):
        from pdlcheck.harness.collection.debugged_rank import require_the_rank

        require_the_rank(session.config, session.items)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Return the line about tests that do not have the rank of ``--rank-pdb``."""
    if config.option.pdl_rank_pdb is None:
        return []
    from pdlcheck.harness.collection.debugged_rank import tests_without

    line = tests_without(config, items)
    return [] if line is None else [line]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the worlds, and stop listening for the debugger of a rank."""
    close_worlds(config)
    if config.getoption("--pdl-rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.item_runners.processes.lent_terminal import take_back

        take_back(config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """Import a test file that mentions ranks with random streams that a replay repeats."""
    if not drawn_at_import.asks_for_ranks(collector):
        return (yield)
    item_hooks.keep_ctrl_c(collector.config)  # the file may import torch
    with drawn_at_import.streams_of(collector):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> pytest.Collector | None:
    """Collect classes whose tests run on ranks: ``unittest.TestCase``, and DeepSpeed's ``DistributedTest``."""
    if not issubclass(type(obj), type):  # isinstance would read the object's __class__, which may raise
        return None
    if cases.names_worlds(collector.config):
        from pdlcheck.harness.collection import distributed_tests
        from pdlcheck.harness.running.distributed_tests import run

        distributed_tests.collect(collector, name, obj, run)
    if not issubclass(obj, TestCase):
        return None
    from pdlcheck.harness.collection import unittest_cases

    return unittest_cases.collected(collector, name, obj)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a test for each world and each world size."""
    if cases.may_name_ranks(metafunc.definition, metafunc.fixturenames):
        from pdlcheck.harness.collection import parametrize_ranks

        parametrize_ranks.repeat(metafunc)


@pytest.hookimpl(trylast=True, specname="pytest_generate_tests")
def pytest_generate_tests_by_parameters(metafunc: pytest.Metafunc) -> None:
    """Repeat a test whose parameters carry the marker ``world_size``."""
    if any(call.marks for call in parameter_sets(metafunc)):
        from pdlcheck.harness.collection import parametrize_ranks

        parametrize_ranks.repeat_by_parameters(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Prepare a test that uses our fixtures for Hypothesis."""
    on_ranks = cases.case_of(item) is not None
    if not on_ranks and not plugin_fixtures.uses_ours(item):
        return
    if on_ranks or plugin_fixtures.uses_fixture(item, "subject"):
        from pdlcheck.harness.running.examples import accept_rank_fixtures

        accept_rank_fixtures(item, on_ranks=on_ranks)
    elif cases.world_of(item) is not None:
        from pdlcheck.harness.running.examples import accept_instances

        accept_instances(item)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> World:
    """Run functions on ranks: ``world.run(fn, *args, world_size=N)`` calls fn on every rank.

    A test with this fixture runs once for each world of ``--world``.
    """
    from pdlcheck.harness.running.worlds import open_world

    return open_world(request.config, getattr(request, "param", None))


@pytest.fixture
def world_size() -> int:
    """Return the number of ranks of this test."""
    from pdlcheck.harness.rank_context import rank_context

    return rank_context("world_size").world_size


@pytest.fixture
def rank() -> int:
    """Return the number of this rank, from 0 to ``world_size - 1``."""
    from pdlcheck.harness.rank_context import rank_context

    return rank_context("rank").rank


@pytest.fixture
def device() -> torch.device:
    """Return the device of this rank: the CPU, or its CUDA device on nccl and with ``--rank-device cuda``."""
    from pdlcheck.harness.rank_context import rank_context

    return rank_context("device").device


@pytest.fixture
def group() -> dist.ProcessGroup:
    """Return the default process group."""
    from pdlcheck.harness.rank_context import default_group

    return default_group()


@pytest.fixture(name=plugin_fixtures.LIFE)
def life_of_a_test_case(request: pytest.FixtureRequest) -> Generator[None]:
    """Run the ``setUp`` and ``tearDown`` of a ``unittest.TestCase`` whose methods run on ranks."""
    from pdlcheck.harness.collection.unittest_cases import live

    yield from live(request)


@pytest.fixture
def rank_benchmark(request: pytest.FixtureRequest, benchmark: Any) -> Generator[RankBenchmark]:
    """Time a function on every rank: ``rank_benchmark(fn, *args)``; rows and options are those of pytest-benchmark.

    In a test whose body runs on ranks, every rank calls it with its own objects and gets the result of ``fn`` on that
    rank. In a test with the fixture ``world``, it calls ``fn`` on ``world_size`` ranks and returns one result for each
    rank. A round begins with a barrier, and the slowest rank counts. The ranks' operations are not watched during a
    round. On ``sim``, and with ``--benchmark-disable``, it calls ``fn`` once, checks the result, and times nothing.

    The call takes these keyword arguments:
        nbytes: data of one rank in one call; the row then has ``algbw_GBps``.
        operation: the collective, such as ``all_reduce``; the row then has ``busbw_GBps``, as in nccl-tests.
        against: another function, or several by name, that take turns with ``fn`` and get the same arguments; the row
            of ``fn`` then has the ratio of the medians to each of them, with its 95 % interval.
        check: called with the result of each function; it raises, or returns the number of wrong elements.
        setup: called before each sample, not timed.
        iterations: calls in one sample; default: as many as fill a millisecond, or 1 with ``setup``.
        world_size: number of ranks, for a test that has no number of its own.
        facts: further columns of the row in the JSON; the values of rank 0 count.
    """
    from pdlcheck.item_runners.rank_benchmark import RankBenchmark

    callspec = getattr(request.node, "callspec", None)
    yield RankBenchmark(request.node, benchmark, None if callspec is None else callspec.params.get("world"))
    # pytest-benchmark warns about an unused fixture, even if another fixture skipped the test.
    benchmark.skipped = True


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """Return a temporary folder that is the same on every rank of this test; each rank has its own ``tmp_path``."""
    from pdlcheck.harness.running.folders import clear_shared, shared_of

    if cases.case_of(request.node) is None:
        request.addfinalizer(lambda: clear_shared(request.node))  # noqa: PT021 - with yield, ranks would remove it too
    return shared_of(request.node)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return the primitive named by the marker ``verifies``, or the function that ``--subject`` puts in its place."""
    from pdlcheck.harness.collection.subjects import find

    return find(request)
