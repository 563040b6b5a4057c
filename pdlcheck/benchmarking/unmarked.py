"""A pytest plugin of ``pdlcheck bench FILE``: tests without the marker ``world_size`` run on the ranks of the command.

It is a module, and not an object of the session, because ranks collect the tests again in their own processes.
"""

from __future__ import annotations

import pytest

OPTION = "--pdl-bench-ranks"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the numbers of ranks."""
    parser.addoption(OPTION, dest="pdl_bench_ranks", help="numbers of ranks, such as 1,2,4")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the marker ``world_size`` to unmarked tests that request ``rank_benchmark``."""
    requested, marked = metafunc.fixturenames, metafunc.definition.get_closest_marker("world_size")
    if "rank_benchmark" in requested and "world" not in requested and marked is None:
        ranks = metafunc.config.getoption("pdl_bench_ranks").split(",")
        metafunc.definition.add_marker(pytest.mark.world_size(*map(int, ranks)))
