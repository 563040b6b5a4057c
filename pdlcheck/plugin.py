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

from pdlcheck.harness.collection import (
    cases,
    debugged_rank,
    marker_ownership,
    misused,
    option_checks,
    options,
    plugin_fixtures,
    repeated,
    short_names,
    unittest_cases,
)
from pdlcheck.harness.reporting import world_counts
from pdlcheck.harness.running import context, differing, interrupt, launch_decision, launched, skips, worlds
from pdlcheck.worlds.registry import when_made

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pdlcheck.worlds import World


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


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
    when_made(worlds.look_after)
    if not cases.runs_in_a_rank(config):
        config.pluginmanager.register(world_counts.WorldCounts(), "pdlcheck.harness.reporting.world_counts")
    if not config.getoption("fulltrace", True):  # absent in ranks
        config.pluginmanager.register(interrupt, "pdlcheck.harness.running.interrupt")
    if hasattr(config, "workerinput"):
        from pdlcheck.harness.collection.devices import divide_among_workers

        divide_among_workers(config)
    if differing.compares_worlds(config):
        config.pluginmanager.register(differing.Differing(config), "pdlcheck.harness.running.differing")
    if config.getoption("--pdl-rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.terminal import debug_simulated

        debug_simulated(config, config.getoption("--pdl-rank-pdb"))


@pytest.hookimpl(trylast=True, specname="pytest_configure")
def pytest_configure_of_a_launch(config: pytest.Config) -> None:
    if not cases.runs_in_a_rank(config):
        launch_decision.begin(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    plugin_fixtures.give_way_to_other_plugins(session)
    worlds.warm_up(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if not cases.runs_in_a_rank(session.config):
        launch_decision.decide(session)
        debugged_rank.require_the_rank(session.config, session.items)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    lines = launched.headline(config), debugged_rank.tests_without(config, items)
    return [line for line in lines if line is not None]


@pytest.hookimpl(tryfirst=True, specname="pytest_runtestloop")
def pytest_runtestloop_of_a_launch(session: pytest.Session) -> None:
    launch_decision.serve_if_agent(session)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if line := debugged_rank.calls_without(config):
        terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    try:
        result = yield
    except (session.Failed, session.Interrupted, pytest.exit.Exception) as end:  # and not Ctrl-C, which ends ranks too
        if worlds.open_worlds(session.config):
            from pdlcheck.harness.running.ranked import finish_ranks, status_of

            finish_ranks(session.config, status_of(end))
        raise
    if session.config.pluginmanager.hasplugin("_cov") and worlds.open_worlds(session.config):
        from pdlcheck.harness.rank.coverage import hand_over

        worlds.close_worlds(session.config)  # ranks write their last data when they end
        worlds.bring_coverage(session.config)
        hand_over(session.config)
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    worlds.close_worlds(config)
    if config.getoption("--pdl-rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.terminal import take_back

        take_back(config)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> pytest.Collector | None:
    return unittest_cases.collected(collector, name, obj)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    repeated.repeat(metafunc)


@pytest.hookimpl(trylast=True, specname="pytest_generate_tests")
def pytest_generate_tests_by_parameters(metafunc: pytest.Metafunc) -> None:
    repeated.repeat_by_parameters(metafunc)


def pytest_itemcollected(item: pytest.Item) -> None:
    on_ranks = cases.case_of(item) is not None
    if on_ranks or marker_ownership.uses_fixture(item, "subject"):
        from pdlcheck.harness.running.examples import accept_rank_fixtures

        accept_rank_fixtures(item, on_ranks=on_ranks)
    elif cases.world_of(item) is not None:
        from pdlcheck.harness.running.examples import accept_instances

        accept_instances(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    in_rank = cases.runs_in_a_rank(item.config)
    if item.get_closest_marker("gpu") and marker_ownership.skips_without_cuda(item, on_ranks=in_rank):
        from pdlcheck.harness.collection.gpu import require_cuda

        require_cuda(item.config)
    if in_rank:
        return
    cases.require_ranks(item)
    misused.require_sense(item)
    if cases.world_of(item) is not None:
        from pdlcheck.harness.running.time_limits import not_counted

        with not_counted(item):  # torch is imported here at the latest
            worlds.isolate(item)
            if cases.case_of(item) is not None:
                from pdlcheck.harness.running.ranked import prepare

                prepare(item)


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")
def pytest_runtest_setup_with_enough_ranks(item: pytest.Item) -> Generator[None]:
    __tracebackhide__ = True
    with skips.too_few_ranks_skip(item), skips.plain_skips():
        yield
        if cases.runs_in_a_rank(item.config):
            misused.require_own_values(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if cases.runs_in_a_rank(pyfuncitem.config):
        return None
    if cases.case_of(pyfuncitem) is None:
        if pyfuncitem.get_closest_marker("schedules") is None:
            return None
        from pdlcheck.harness.collection.schedules import call_under_schedules, runs_under_schedules

        if not runs_under_schedules(pyfuncitem):
            return None
        call_under_schedules(pyfuncitem)
        return True
    from pdlcheck.harness.running.ranked import call

    call(pyfuncitem)
    return True


def _remember_next(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if cases.case_of(item) is not None:
        from pdlcheck.harness.running.following import remember_next

        remember_next(item, nextitem)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    _remember_next(item, nextitem)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    _remember_next(item, nextitem)
    try:
        yield
    finally:  # also where the last teardown fails: ranks of other world sizes may keep fixtures
        if nextitem is None and worlds.open_worlds(item.config):
            from pdlcheck.harness.running.ranked import finish_ranks

            finish_ranks(item.config, int(item.session.testsfailed > 0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    __tracebackhide__ = True
    if cases.runs_in_a_rank(item.config):
        with skips.too_few_ranks_skip(item):
            yield
        return
    world = getattr(item, "funcargs", {}).get("world")
    with skips.too_few_ranks_skip(item), skips.plain_skips(), worlds.with_faults(item):
        if cases.case_of(item) is not None or cases.world_of(item) is None or world is None:
            yield
            return
        from pdlcheck.harness.running.time_limits import limited

        with limited(item, world), debugged_rank.noting_world_sizes(item, world):
            yield


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Of pytest-timeout: its limit for a test on rank processes is kept by their world."""
    from pdlcheck.harness.running.time_limits import GRACE_S, take_over

    if not take_over(item, settings.timeout):
        return None
    if cases.case_of(item) is None:  # its body runs here and may hang outside the ranks
        timers = item.config.pluginmanager.getplugin("timeout")
        timers.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout + GRACE_S))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    rank, debugs = node.config.getoption("--pdl-rank-pdb"), node.config.getoption("usepdb", False)
    case = cases.case_of(node) if (rank is not None) != debugs else None
    if case is not None and rank is None and case.world != "sim":
        from pdlcheck.harness.reporting.terminal import tell_where_the_ranks_are

        tell_where_the_ranks_are(node, call)
    if case is not None and rank is not None and case.world == "sim":
        from pdlcheck.harness.reporting.terminal import post_mortem_on_sim

        post_mortem_on_sim(node, call, report, rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if cases.runs_in_a_rank(item.config):
        return report
    if call.excinfo is not None and cases.case_of(item) is not None:
        from pdlcheck.harness.reporting.reports import take_expected

        take_expected(call.excinfo.value, report)
    if report.failed:
        from pdlcheck.harness.reporting.reports import tell

        tell(item, call, report)
    if (world_name := cases.world_of(item)) is not None:
        world_counts.mark(report, world_name)
    if item.config.getoption("--pdl-timeline") is not None:
        from pdlcheck.harness.reporting.pictures import draw

        draw(item, report)
    return report


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> World:
    """Where ranks run: ``world.run(fn, *args, world_size=N)`` calls fn on every rank, once for each ``--world``."""
    return worlds.open_world(request.config, getattr(request, "param", None))


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
    return context.rank_context("group").group


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
