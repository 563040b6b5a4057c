"""Calls of conftest files and plugins to the terminal in a rank, whose output no user reads."""

from __future__ import annotations

import pytest

ONE = "@W\ndef test_one(rank): dist.barrier()\n"


def test_options_of_the_terminal_are_known_in_ranks(run, pytester):
    pytester.makeconftest("""
def pytest_configure(config):
    config.own = [config.getoption(name) for name in ("--verbose", "-v", "--tb", "-q", "--color", "-r", "--showlocals")]
""")
    run(ONE, "-v", "--tb=short").assert_outcomes(passed=1)


def test_the_reporter_is_there_and_writes_nowhere(run, pytester):
    pytester.makeconftest("""
import pytest

@pytest.fixture
def reporter(request): return request.config.pluginmanager.get_plugin("terminalreporter")

def pytest_runtest_setup(item):
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    reporter.write_line("said by a hook")
    reporter.section("a section")
""")
    result = run(ONE + "@W\ndef test_verbosity(reporter): assert reporter.verbosity == 1", "-v", "-rA")
    result.assert_outcomes(passed=2)
    assert result.stdout.str().count("said by a hook") == 2  # from the hook in the controller


@pytest.mark.slow
def test_a_writer_that_is_made_when_plugins_are_configured_may_be_used_later(run, pytester):
    """Regression test: the stream was closed; pytest-split writes like this."""
    pytester.makeconftest("""
from _pytest.config import create_terminal_writer

def pytest_configure(config): config.writer = create_terminal_writer(config)

def pytest_collection_modifyitems(config, items): config.writer.line(f"{len(items)} tests chosen")
""")
    result = run(ONE, new_process=True)
    result.assert_outcomes(passed=1)
    assert result.stdout.str().count("1 tests chosen") == 1


def test_what_a_file_prints_when_it_cannot_be_imported_is_shown(run):
    result = run(
        """
if "RANK" in os.environ:
    print("printed by a rank")
    os.write(1, b"and by descriptor")
    raise ValueError("not here")
"""
        + ONE
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ValueError: not here*"])


PLUGIN = """
import pytest

seen = {}

def pytest_configure(config): config.addinivalue_line("markers", "flaky: is tried again")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    seen[item.nodeid] = []
    return (yield)

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    seen[item.nodeid].append(report.outcome)
    return report
"""


def test_a_plugin_that_repeats_tests_has_no_hooks_in_ranks(run, pytester):
    """The plugin pytest-retry counts outcomes in the hook around a whole test, which ranks do not have."""
    pytester.makepyfile(retry_plugin=PLUGIN)
    pytester.makepyfile(**{"pytest_retry/__init__": "", "pytest_retry/retry_plugin": PLUGIN})
    marked = ONE.replace("@W", "@W\n@pytest.mark.flaky")
    pytester.syspathinsert()
    run(marked, "-p", "pytest_retry.retry_plugin", "--strict-markers").assert_outcomes(passed=1)
    run(marked, "-p", "retry_plugin", "--strict-markers").assert_outcomes(failed=1, errors=1)
