"""pytest plugin: markers, options and fixtures. What they do is in ``pdlcheck.harness``; torch is imported there, late.

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

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.harness import item_hooks
from pdlcheck.harness.collection import (
    cases,
    distributed_tests,
    drawn_at_import,
    marker_ownership,
    option_checks,
    options,
    plugin_fixtures,
    repeated,
    short_names,
    unittest_cases,
)
from pdlcheck.harness.running import context, launch_decision, launched
from pdlcheck.harness.running.open_worlds import close_worlds
from pdlcheck.worlds.registry import when_made

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pdlcheck.worlds import World


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    options.add_options(parser)
    pluginmanager.register(item_hooks, item_hooks.NAME)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    return (yield from short_names.replace_short_names(early_config, parser, args))


@pytest.hookimpl(wrapper=True, specname="pytest_load_initial_conftests")
def pytest_load_initial_conftests_of_a_launch(early_config: pytest.Config) -> Generator[None, object, object]:
    launched.stay_out_of_mpi(early_config)
    return (yield from launched.excuse(early_config))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return launched.follow(config)


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_cmdline_main")
def pytest_cmdline_main_of_a_launch(config: pytest.Config) -> Generator[None, object, object]:
    return (yield from launched.lead(config))


def pytest_configure(config: pytest.Config) -> None:
    marker_ownership.register(config)
    marker_ownership.note_what_was_asked(config)
    option_checks.check_options(config)
    when_made(_look_after)
    if "," in config.option.pdl_world:
        from pdlcheck.harness.running import differing

        if differing.compares_worlds(config):
            config.pluginmanager.register(differing.Differing(config), "pdlcheck.harness.running.differing")
    if config.getoption("--pdl-rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.terminal import debug_simulated

        debug_simulated(config, config.getoption("--pdl-rank-pdb"))


def _look_after(world: World) -> None:
    from pdlcheck.harness.running.worlds import look_after

    look_after(world)


@pytest.hookimpl(trylast=True, specname="pytest_configure")
def pytest_configure_of_a_launch(config: pytest.Config) -> None:
    if not cases.runs_in_a_rank(config):
        launch_decision.begin(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    plugin_fixtures.give_way_to_other_plugins(session)
    if session.config.option.pdl_world != "sim":
        from pdlcheck.harness.running.worlds import warm_up

        warm_up(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if cases.runs_in_a_rank(session.config):
        return
    launch_decision.decide(session)
    if session.config.option.pdl_rank_pdb is not None:
        from pdlcheck.harness.collection.debugged_rank import require_the_rank

        require_the_rank(session.config, session.items)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    lines = [launched.headline(config)]
    if config.option.pdl_rank_pdb is not None:
        from pdlcheck.harness.collection.debugged_rank import tests_without

        lines.append(tests_without(config, items))
    return [line for line in lines if line is not None]


@pytest.hookimpl(tryfirst=True, specname="pytest_runtestloop")
def pytest_runtestloop_of_a_launch(session: pytest.Session) -> None:
    launch_decision.serve_if_agent(session)


def pytest_unconfigure(config: pytest.Config) -> None:
    close_worlds(config)
    if config.getoption("--pdl-rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.terminal import take_back

        take_back(config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    with drawn_at_import.streams_of(collector):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> pytest.Collector | None:
    distributed_tests.collect(collector, name, obj)
    return unittest_cases.collected(collector, name, obj)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    repeated.repeat(metafunc)


@pytest.hookimpl(trylast=True, specname="pytest_generate_tests")
def pytest_generate_tests_by_parameters(metafunc: pytest.Metafunc) -> None:
    repeated.repeat_by_parameters(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    on_ranks = cases.case_of(item) is not None
    if on_ranks or plugin_fixtures.uses_fixture(item, "subject"):
        from pdlcheck.harness.running.examples import accept_rank_fixtures

        accept_rank_fixtures(item, on_ranks=on_ranks)
    elif cases.world_of(item) is not None:
        from pdlcheck.harness.running.examples import accept_instances

        accept_instances(item)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> World:
    """Where ranks run: ``world.run(fn, *args, world_size=N)`` calls fn on every rank, once for each ``--world``."""
    from pdlcheck.harness.running.worlds import open_world

    return open_world(request.config, getattr(request, "param", None))


@pytest.fixture
def world_size() -> int:
    """Number of ranks of this test."""
    return context.rank_context("world_size").world_size


@pytest.fixture
def rank() -> int:
    """This rank, from 0 to ``world_size - 1``."""
    return context.rank_context("rank").rank


@pytest.fixture
def device() -> torch.device:
    """The device of this rank: the CPU; on nccl, and with ``--rank-device cuda``, its CUDA device."""
    return context.rank_context("device").device


@pytest.fixture
def group() -> dist.ProcessGroup:
    """The default process group."""
    return context.default_group()


@pytest.fixture(name=unittest_cases.LIFE)
def life_of_a_test_case(request: pytest.FixtureRequest) -> Generator[None]:
    """Of the methods of a ``unittest.TestCase`` that run on ranks."""
    yield from unittest_cases.live(request)


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Path:
    """A temporary folder that is the same on every rank of this test; ``tmp_path`` is each rank's own."""
    from pdlcheck.harness.running.folders import clear_shared, shared_of

    if cases.case_of(request.node) is None:
        request.addfinalizer(lambda: clear_shared(request.node))
    return shared_of(request.node)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The primitive named by the marker ``verifies``, or the function that ``--subject`` puts in its place."""
    from pdlcheck.harness.collection.subjects import find

    return find(request)
