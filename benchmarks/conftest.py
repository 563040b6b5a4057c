"""Options and fixtures of the benchmark suites, for ``pdlcheck bench`` and ``pytest benchmarks``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore = ["comparisons"]  # these are separate programs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="larger inputs, more ranks and more rounds: takes long")
    parser.addoption("--ranks", default="2", help="numbers of ranks of the benchmarks on ranks; default: %(default)s")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("markers", "full: runs with --full alone")
    config.addinivalue_line("markers", "between_ranks: communicates, which one rank alone does not")
    config.addinivalue_line("markers", "from_one_rank: runs on one rank, too, which the others are compared with")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run benchmarks that use ranks with each number of ranks in ``--ranks``."""
    if "rank_benchmark" in metafunc.fixturenames and metafunc.definition.get_closest_marker("world_size") is None:
        sizes = {int(size) for size in metafunc.config.getoption("--ranks").split(",")}
        if metafunc.definition.get_closest_marker("from_one_rank"):
            sizes.add(1)
        elif metafunc.definition.get_closest_marker("between_ranks"):
            sizes = {size for size in sizes if size > 1} or {2}
        metafunc.definition.add_marker(pytest.mark.world_size(*sorted(sizes)))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # results are published: the hardware matters, not the host name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the comparisons inside one benchmark, which the table of times does not show."""
    session = getattr(config, "_benchmarksession", None)
    rows = [bench.extra_info["row"] for bench in session.benchmarks if "row" in bench.extra_info] if session else []
    if rows:
        terminalreporter.section("compared within one run")
        for line in rows:
            terminalreporter.line(line)


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    commit_info["project"] = "pdlcheck"  # else pytest-benchmark uses the name of the clone's folder


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Return whether ``--full`` was given."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Record hardware, versions and the load of the machine, before and after."""
    if "benchmark" not in request.fixturenames or "rank_benchmark" in request.fixturenames:
        yield
        return
    extra_info: dict[str, Any] = request.getfixturevalue("benchmark").extra_info
    extra_info["load_before"] = os.getloadavg()[0]
    yield
    extra_info |= {
        "load_after": os.getloadavg()[0],
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
