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

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.harness import cases, interrupt, launched
from pdlcheck.worlds.arguments import ISOLATIONS

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pdlcheck.worlds import World

_exitcode: pytest.StashKey[int] = pytest.StashKey()

MARKERS = (
    "world_size(*sizes): run the body of the test on every rank, once for each number of ranks",
    "isolation(mode): what the test shares with others on processes: 'pool', 'reinit' or 'fresh'",
    "gpu: needs CUDA; skipped with a reason where there is none",
    "verifies(primitive): the primitive that a suite test is about; the fixture `subject` returns it",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pdlcheck", "parallel code on several ranks")
    group.addoption(
        "--world",
        metavar="NAME[,NAME]",
        help="where ranks run: sim (simulated, in this process), gloo (processes) or mpi (processes in a run of "
        "mpiexec); default: sim, and gloo under torchrun, mpiexec or srun",
    )
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
        help="seed of the simulated schedule and of the ranks' random streams; default: %(default)s",
    )
    group.addoption(
        "--subject",
        action="append",
        metavar="NAME=MODULE:FUNCTION",
        default=[],
        help="run the suites of primitive NAME on your own function instead; may be repeated",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    return launched.follow(config)


def pytest_report_header(config: pytest.Config) -> str | None:
    return launched.headline(config)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    cases.check_options(config)
    if not config.getoption("fulltrace", True):  # absent in ranks
        config.pluginmanager.register(interrupt, "pdlcheck.harness.interrupt")


def pytest_collection(session: pytest.Session) -> None:
    cases.warm_up(session.config)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_exitcode] = int(exitstatus)


def pytest_unconfigure(config: pytest.Config) -> None:
    cases.close_worlds(config, config.stash.get(_exitcode, int(pytest.ExitCode.INTERNAL_ERROR)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.parametrize(metafunc, world)


def pytest_itemcollected(item: pytest.Item) -> None:
    if cases.case_of(item) is not None or item.get_closest_marker("verifies"):
        from pdlcheck.harness.examples import accept_rank_fixtures

        accept_rank_fixtures(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        from pdlcheck.harness.gpu import require_cuda

        require_cuda()
    cases.require_ranks(item)
    cases.isolate(item)
    if cases.case_of(item) is not None:
        from pdlcheck.harness.ranked import prepare

        prepare(item)


@pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")
def pytest_runtest_setup_with_enough_ranks(item: pytest.Item) -> Generator[None]:
    __tracebackhide__ = True
    with cases.too_few_ranks_skip():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if cases.case_of(pyfuncitem) is None or cases.runs_in_a_rank(pyfuncitem.config):
        return None
    from pdlcheck.harness.ranked import call

    call(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    __tracebackhide__ = True
    with cases.too_few_ranks_skip():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and not cases.runs_in_a_rank(item.config):
        from pdlcheck.harness.reports import tell

        tell(item, call, report)
    return report


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> World:
    """Where ranks run: ``world.run(fn, *args, world_size=N)`` calls fn on every rank, once for each ``--world``."""
    return cases.open_world(request.config, getattr(request, "param", None))


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this test."""
    return cases.rank_context(request, "world_size").world_size


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> int:
    """This rank, from 0 to ``world_size - 1``."""
    return cases.rank_context(request, "rank").rank


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of this rank."""
    return cases.rank_context(request, "device").device


@pytest.fixture
def group(request: pytest.FixtureRequest) -> dist.ProcessGroup:
    """The default process group."""
    return cases.rank_context(request, "group").group


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The primitive named by the marker ``verifies``, or the function that ``--subject`` puts in its place."""
    from pdlcheck.harness.subjects import find

    return find(request)
