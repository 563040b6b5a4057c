"""Plugins that wrap the call of a test, or call async ones, such as those for memory measurements or event loops."""

from __future__ import annotations

import pytest

WRAPS = """
import functools, pytest

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    body = pyfuncitem.obj

    @functools.wraps(body)
    def watched(*args, **kwargs):
        body(*args, **kwargs)
        if "leaks" in pyfuncitem.name:
            raise AssertionError("the wrapper has found a leak")

    pyfuncitem.obj = watched
    try:
        return (yield)
    finally:
        pyfuncitem.obj = body
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_plugin_puts_around_the_body_is_called_on_ranks(run, pytester, world):
    pytester.makeconftest(WRAPS)
    result = run(
        """
@W
def test_leaks(rank): dist.barrier()

@W
def test_good(rank, request): dist.barrier()

class TestMethods:
    def setup_method(self): self.seen = []

    @W
    def test_method_leaks(self, rank): pass

    @W
    def test_method(self, rank):
        self.seen.append(rank)
        dist.barrier()
        assert self.seen == [rank]

@W
def test_request_leaks(rank, request): dist.barrier()

def test_plain_leaks(): pass
""",
        world=world,
    )
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(["*the wrapper has found a leak*"])


def test_no_plugin_for_async_tests_runs_their_bodies_once_for_all_simulated_ranks(run, pytester):
    """The plugin of anyio does so, before others."""
    pytester.makeconftest("""
import asyncio, inspect, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs.get(name) for name in names}))
        return True
""")
    result = run(
        "@W\nasync def test_one_rank(rank): assert rank in (1, None)\n\nasync def test_plain(): pass\n", world="sim"
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the body of an async test cannot run on simulated ranks; write a plain function*"])
