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

from pdlcheck.harness.collection import cases, cuda_as_cpu, debugged_rank, misused, options, repeated, unittest_cases
from pdlcheck.harness.running import context, differing, interrupt, launched, skips, worlds
from pdlcheck.worlds.arguments import ISOLATIONS
from pdlcheck.worlds.devices import DEVICES
from pdlcheck.worlds.registry import when_made
from pdlcheck.worlds.semantics import PROFILES

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pdlcheck.worlds import World

MARKERS = (
    "world_size(*sizes): run the body of the test on every rank, once for each number of ranks",
    "isolation(mode): what the test shares with others on processes: 'pool', 'reinit' or 'fresh'",
    "semantics(profile, **changes): what the simulated network does where the rules leave a choice, such as "
    "semantics('nccl') or semantics(send='buffered', leaks=False); real backends have their own",
    "faults(*faults): on sim, what the ranks suffer in the body of the test, such as faults(Kill(rank=1, operation=3))",
    "schedules(count): on sim, run the test under so many schedules, or under 'all' of them that differ",
    "gpu: needs CUDA; skipped with a reason where there is none",
    "verifies(primitive): the primitive that a suite test is about; the fixture `subject` returns it",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdlcheck", "parallel code on several ranks")
    group.addoption(
        "--world",
        metavar="NAME[,NAME]",
        help="where ranks run: sim (simulated, in this process), gloo (processes), mpi (processes in a run of "
        "mpiexec) or nccl (processes with a CUDA device each); default: sim, and gloo under torchrun, mpiexec or srun",
    )
    group.addoption(
        "--rank-device",
        choices=DEVICES,
        help="the fixture `device` of the ranks: cpu, or cuda, whose devices the ranks of gloo share, and those of sim "
        "the first; default: cuda on nccl, cpu elsewhere",
    )
    cuda_as_cpu.add_option(parser)
    group.addoption(
        "--init-method",
        metavar="URL",
        help="where the processes of torchrun, mpiexec or srun meet: env://, tcp://HOST:PORT or file:///PATH; default: "
        "env:// if MASTER_ADDR and MASTER_PORT are set",
    )
    group.addoption(
        "--isolation",
        choices=ISOLATIONS,
        default="pool",
        help="what tests on processes share: pool (the processes and their default group), reinit (the processes; "
        "each test has a new default group), fresh (nothing); default: %(default)s; a marker `isolation` comes first",
    )
    group.addoption(
        "--pdl-seed",
        type=int,
        metavar="N",
        default=0,
        help="seed of the ranks' random streams, and of the simulated schedule; default: %(default)s",
    )
    group.addoption(
        "--schedule",
        metavar="SCHEDULE",
        help="which simulated rank goes on: first, random:SEED, pct:SEED[,DEPTH[,STEPS]] or replay:CODE, as a failure "
        "prints it; default: random, from --pdl-seed; where it is given the marker schedules says nothing",
    )
    group.addoption(
        "--semantics",
        choices=sorted(PROFILES),
        default="rendezvous",
        help="what the simulated network does where the rules leave a choice; default: %(default)s; a marker "
        "`semantics` comes first",
    )
    parser.addini(
        "pdlcheck_own_globals",
        "modules, or packages, whose globals each simulated rank has for itself, as a process would",
        type="args",
        default=[],
    )
    group.addoption(
        "--timeline",
        metavar="DIR",
        help="on sim, draw what the ranks of each test did: DIR/TEST.svg, and DIR/TEST.json for ui.perfetto.dev; of a "
        "test that calls world.run several times, the last call",
    )
    group.addoption(
        "--subject",
        action="append",
        metavar="NAME=MODULE:FUNCTION",
        default=[],
        help="run the suites of primitive NAME on your own function instead; may be repeated",
    )
    group.addoption(
        "--rank-pdb",
        type=int,
        metavar="RANK",
        help="give the terminal to the debugger of this rank, at breakpoint() and at its failure; the others wait",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    launched.stay_out_of_mpi(early_config)
    return (yield from launched.excuse(early_config))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return launched.follow(config)


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_cmdline_main")
def pytest_cmdline_main_of_a_launch(config: pytest.Config) -> Generator[None, object, object]:
    return (yield from launched.lead(config))


def pytest_report_header(config: pytest.Config) -> str | None:
    return launched.headline(config)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): time limit of the test on its ranks")
    options.check_options(config)
    when_made(worlds.look_after)
    if not config.getoption("fulltrace", True):  # absent in ranks
        config.pluginmanager.register(interrupt, "pdlcheck.harness.running.interrupt")
    if hasattr(config, "workerinput"):
        from pdlcheck.harness.collection.devices import divide_among_workers

        divide_among_workers(config)
    if differing.compares_worlds(config):
        config.pluginmanager.register(differing.Differing(config), "pdlcheck.harness.running.differing")
    if config.getoption("--rank-pdb") is not None and not cases.runs_in_a_rank(config):
        from pdlcheck.harness.reporting.terminal import debug_simulated

        debug_simulated(config, config.getoption("--rank-pdb"))


def pytest_collection(session: pytest.Session) -> None:
    worlds.warm_up(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if not cases.runs_in_a_rank(session.config):
        debugged_rank.require_the_rank(session.config, session.items)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    return debugged_rank.tests_without(config, items)


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
    if config.getoption("--rank-pdb") is not None and not cases.runs_in_a_rank(config):
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
    if on_ranks or item.get_closest_marker("verifies"):
        from pdlcheck.harness.running.examples import accept_rank_fixtures

        accept_rank_fixtures(item, on_ranks=on_ranks)
    elif cases.world_of(item) is not None:
        from pdlcheck.harness.running.examples import accept_instances

        accept_instances(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from pdlcheck.harness.collection.gpu import require_cuda

        require_cuda()
    if cases.runs_in_a_rank(item.config):
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
    rank, debugs = node.config.getoption("--rank-pdb"), node.config.getoption("usepdb", False)
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
    if item.config.getoption("--timeline") is not None:
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
