"""The pytest hooks around each test that runs on ranks or calls them.

They are a plugin of their own so that it can be unregistered: if no collected test needs them, none of our hooks runs
for any test, and nothing that the hooks import on first use is imported. ``pdlcheck.plugin`` registers this plugin
together with itself, because the hooks rely on their position among other plugins. This module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from pdlcheck.compat.private import warn_of_missing
from pdlcheck.harness.collection import cases, marker_ownership
from pdlcheck.harness.running.open_worlds import close_worlds, open_worlds
from pdlcheck.worlds.registry import is_simulated

__all__ = ["NAME", "keep_ctrl_c"]

NAME = "pdlcheck.item_runners.item_hooks"
_COUNTS, _INTERRUPT = "pdlcheck.harness.reporting.world_counts", "pdlcheck.harness.running.interrupt"
_UNSEEN = "pdlcheck.harness.reporting.unseen_conditions"


def pytest_configure(config: pytest.Config) -> None:
    """Count tests by world in the controller of pytest-xdist, and warn if pytest lacks private names."""
    if cases.runs_in_a_rank(config):
        return
    # The controller of pytest-xdist collects no tests, so pytest_collection_finish never runs there.
    if config.getoption("dist", "no") != "no":
        _add_summaries(config)
        _warn_of_missing_names(config, only_registered=False)
    else:
        _warn_of_missing_names(config, only_registered=True)  # the other names matter only to tests with ranks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Unregister the hooks if no collected test needs them."""
    if cases.runs_in_a_rank(session.config):
        return
    if any(map(marker_ownership.is_concerned, session.items)) or "torch.distributed" in sys.modules:
        _stay(session.config)  # a failure of a test that only uses torch.distributed gets a hint
    else:
        _leave(session.config)


def keep_ctrl_c(config: pytest.Config) -> None:
    """Keep a Ctrl-C from now on, even if an import swallows it."""
    # The option fulltrace is absent in ranks.
    if not config.getoption("fulltrace", True) and not config.pluginmanager.has_plugin(_INTERRUPT):
        from pdlcheck.harness.running import interrupt

        config.pluginmanager.register(interrupt, _INTERRUPT)
        interrupt.keep()


def _add_summaries(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(_COUNTS):
        from pdlcheck.harness.reporting.world_counts import WorldCounts

        config.pluginmanager.register(WorldCounts(), _COUNTS)
    if not config.pluginmanager.has_plugin(_UNSEEN):
        from pdlcheck.harness.reporting.unseen_conditions import UnseenConditions, check_ini_values

        check_ini_values(config)
        config.pluginmanager.register(UnseenConditions(config), _UNSEEN)


def _warn_of_missing_names(config: pytest.Config, *, only_registered: bool) -> None:
    if not hasattr(config, "workerinput"):  # the controller of pytest-xdist warns
        warn_of_missing("pytest", partial(_record, config), only_registered=only_registered)


def _record(config: pytest.Config, warning: Warning) -> None:
    from pdlcheck.harness.reporting.summary_warning import record_config_warning

    record_config_warning(config, warning)


def _leave(config: pytest.Config) -> None:
    plugins = config.pluginmanager
    plugins.unregister(name=NAME)
    interrupt: Any = plugins.get_plugin(_INTERRUPT)
    if interrupt is not None:
        plugins.unregister(interrupt)
        interrupt.give_back()


def _stay(config: pytest.Config) -> None:
    keep_ctrl_c(config)
    _add_summaries(config)
    _warn_of_missing_names(config, only_registered=False)
    if hasattr(config, "workerinput"):
        from pdlcheck.harness.collection.devices import divide_among_workers

        divide_among_workers(config)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Finish the ranks after the last test, and collect their coverage data."""
    try:
        result = yield
    # Ctrl-C is not among these exceptions, because it ends the ranks too.
    except (session.Failed, session.Interrupted, pytest.exit.Exception) as end:
        if open_worlds(session.config):
            from pdlcheck.harness.running.ranked import finish_ranks, status_of

            finish_ranks(session.config, status_of(end))
        raise
    if open_worlds(session.config):
        from pdlcheck.compat.pytest_cov import controller_of

        if controller_of(session.config) is not None:
            from pdlcheck.item_runners.processes.node_coverage import bring_coverage
            from pdlcheck.item_runners.processes.rank.coverage import hand_over

            close_worlds(session.config)  # the ranks write their last data when they end
            bring_coverage(session.config)
            hand_over(session.config)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report the calls that did not have the rank of ``--rank-pdb``."""
    if config.getoption("--pdl-rank-pdb") is not None:
        from pdlcheck.harness.collection.debugged_rank import calls_without

        if line := calls_without(config):
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test that cannot run here, and prepare the ranks of the others."""
    in_rank = cases.runs_in_a_rank(item.config)
    if item.get_closest_marker("gpu") and marker_ownership.skips_without_cuda(item, on_ranks=in_rank):
        from pdlcheck.harness.collection.gpu import require_cuda

        require_cuda(item.config)
    if in_rank:
        return
    from pdlcheck.harness.collection import marker_validation, subjects

    subjects.skip_what_is_not_asked(item)
    cases.require_ranks(item)
    marker_validation.require_sense(item)
    if cases.world_of(item) is None:
        for world in open_worlds(item.config):
            from pdlcheck.harness.item_runner import runner_of

            runner_of(world).suspend(world)
    else:
        from pdlcheck.harness.running import worlds
        from pdlcheck.harness.running.time_limits import not_counted

        with not_counted(item):  # torch is imported here at the latest, outside of the test's time limit
            worlds.isolate(item)
            if cases.case_of(item) is not None:
                from pdlcheck.harness.running.ranked import prepare

                prepare(item)


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")
def pytest_runtest_setup_with_enough_ranks(item: pytest.Item) -> Generator[None]:
    """Skip a test whose set-up needs more ranks than there are."""
    __tracebackhide__ = True
    from pdlcheck.harness.running import skips

    with skips.too_few_ranks_skip(item), skips.plain_skips():
        yield
        if cases.runs_in_a_rank(item.config):
            from pdlcheck.harness.collection.marker_validation import require_own_values

            require_own_values(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test on ranks, or once for each schedule."""
    if cases.runs_in_a_rank(pyfuncitem.config):
        return None
    from pdlcheck.harness.collection.distributed_tests import is_distributed_test

    if is_distributed_test(pyfuncitem.cls):
        from pdlcheck.harness.running.distributed_tests import run_item

        run_item(pyfuncitem)
        return True
    if cases.case_of(pyfuncitem) is None:
        if pyfuncitem.get_closest_marker("schedules") is None:
            return None
        from pdlcheck.harness.collection.schedules import runs_under_schedules

        if not runs_under_schedules(pyfuncitem):
            return None
        from pdlcheck.item_runners.simulated.schedules import call_under_schedules

        call_under_schedules(pyfuncitem)
        return True
    from pdlcheck.harness.running.ranked import call

    call(pyfuncitem)
    return True


def _remember_next(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if cases.case_of(item) is not None:
        from pdlcheck.harness.running.next_item import remember_next

        remember_next(item, nextitem)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Record the next item before the test begins."""
    _remember_next(item, nextitem)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Record the next item, and finish the ranks after the last test."""
    _remember_next(item, nextitem)
    try:
        yield
    finally:  # even if the last teardown fails: ranks of other world sizes may keep fixtures
        if nextitem is None and open_worlds(item.config):
            from pdlcheck.harness.running.ranked import finish_ranks

            finish_ranks(item.config, int(item.session.testsfailed > 0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run the call phase with the faults, the skips and the time limit of the test."""
    __tracebackhide__ = True
    from pdlcheck.harness.running import skips

    if cases.runs_in_a_rank(item.config):
        with skips.too_few_ranks_skip(item):
            yield
        return
    from pdlcheck.harness.collection import debugged_rank
    from pdlcheck.harness.running import worlds

    world = getattr(item, "funcargs", {}).get("world")
    with skips.too_few_ranks_skip(item), skips.plain_skips(), worlds.with_faults(item):
        if cases.case_of(item) is not None or cases.world_of(item) is None or world is None:
            yield
            return
        from pdlcheck.harness.item_runner import runner_of

        with runner_of(world).limited(item, world), debugged_rank.noting_world_sizes(item, world):
            yield


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Let the world keep the limit of pytest-timeout, whose hook this is, for a test on rank processes."""
    from pdlcheck.harness.running.time_limits import take_over
    from pdlcheck.time_budgets import TIMEOUT_MARGIN_S

    if not take_over(item, settings.timeout):
        return None
    if cases.case_of(item) is None:  # its body runs in this process and may hang outside of the ranks
        timers = item.config.pluginmanager.getplugin("timeout")
        timers.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout + TIMEOUT_MARGIN_S))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_exception_interact(node: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Start the debugger on a failed simulated rank, or print where the ranks are."""
    rank, debugs = node.config.getoption("--pdl-rank-pdb"), node.config.getoption("usepdb", False)
    case = cases.case_of(node) if (rank is not None) != debugs else None
    if case is not None and rank is None and not is_simulated(case.world):
        from pdlcheck.item_runners.processes.lent_terminal import tell_where_the_ranks_are

        tell_where_the_ranks_are(node, call)
    if case is not None and rank is not None and is_simulated(case.world):
        from pdlcheck.item_runners.simulated.debugging import post_mortem_on_sim

        post_mortem_on_sim(node, call, report, rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put the outcome, the output and the world of the ranks into the report of a test."""
    report = yield
    if cases.runs_in_a_rank(item.config):
        return report
    if call.excinfo is not None:
        from pdlcheck.harness.reporting.reports import use_report_of_ranks
        from pdlcheck.harness.running.skips import MISSING

        use_report_of_ranks(item, call, report)
        if hasattr(call.excinfo.value, MISSING):
            setattr(report, MISSING, True)
    if report.failed:
        from pdlcheck.harness.reporting.reports import add_sections

        add_sections(item, call, report)
    if (world_name := cases.world_of(item)) is not None:
        from pdlcheck.harness.reporting.world_counts import mark

        mark(report, world_name)
    if item.config.getoption("--pdl-timeline") is not None:
        from pdlcheck.harness.reporting.pictures import draw

        draw(item, report)
    return report
