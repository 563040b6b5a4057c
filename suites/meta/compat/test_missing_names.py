"""A private name that the installed library lacks: doctor lists it, and a session warns of it once, at its start."""

from __future__ import annotations

import _pytest.pastebin
import pytest

import pdlcheck.item_runners.simulated.items  # noqa: F401 - modules with state must be imported before inner runs
from pdlcheck.compat import private
from pdlcheck.doctor import examine_private_names


@pytest.fixture
def own_table(monkeypatch):
    monkeypatch.setattr(private, "_registered", dict(private._registered))
    monkeypatch.setattr(private, "_warned_of", set())


def test_doctor_counts_the_names_that_are_there():
    libraries = private.installed_libraries()
    number = sum(len(private.names(library)) for library in libraries)
    (part,) = examine_private_names()
    assert (part.name, part.found, part.cure) == (
        "private names",
        f"all {number} of {', '.join(libraries)} are there",
        "",
    )


def test_doctor_lists_a_broken_name_with_its_purpose_and_what_is_lost(own_table, monkeypatch):
    private.name("_pytest.pastebin.pastebinfile_key", "Paste the report.", lost="the pasted report")
    private.name("unittest.mock._no_such_name", "a test", lost="nothing")
    monkeypatch.delattr(_pytest.pastebin, "pastebinfile_key")
    of_python, of_pytest = examine_private_names()
    assert (of_python.name, of_python.found) == (
        "private names of python",
        "no unittest.mock._no_such_name: a test. Without it: nothing",
    )
    assert (of_pytest.name, of_pytest.found) == (
        "private names of pytest",
        "no _pytest.pastebin.pastebinfile_key: Paste the report. Without it: the pasted report",
    )
    assert of_pytest.cure == "another version of pytest or of pdlcheck"
    assert of_pytest.is_missing
    assert not of_pytest.required


BREAKS = """
import _pytest.debugging, _pytest.doctest

if {at_collection}:
    del _pytest.doctest.DoctestModule
del _pytest.debugging.PdbInvoke
"""
PLAIN = "def test_plain(): pass\n"
RANKED = "import pytest\n\n@pytest.mark.world_size(2)\ndef test_ranked(rank): pass\n"
OF_COLLECTION = "*  _pytest.doctest.DoctestModule: modules that are no test files. Without it: imports of test files*"
OF_RANKS = "*  _pytest.debugging.PdbInvoke: the debugger at a failure of a simulated rank. Without it: --rank-pdb*"
HEAD = "*MissingNameWarning: pytest * lacks private names that pdlcheck uses:"


@pytest.fixture
def session(pytester):
    """Return a function that runs a test file in a session of its own, after names of pytest were deleted."""

    def run(test, *options, at_collection=False):
        pytester.makepyfile(test)
        pytester.makeconftest(BREAKS.format(at_collection=at_collection))
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error", *options)

    return run


def _lines(result, pattern):
    return len([line for line in result.outlines if pattern in line])


def test_a_session_with_ranks_warns_once_of_all_names_even_where_warnings_are_errors(session):
    result = session(RANKED)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([HEAD, OF_RANKS, "*Install another version of pytest or of pdlcheck; pdlcheck doctor*"])
    assert _lines(result, "lacks private names") == 1


def test_a_session_without_ranks_warns_only_of_the_names_that_it_uses(session):
    result = session(PLAIN, at_collection=True)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([HEAD, OF_COLLECTION])
    result.stdout.no_fnmatch_line(OF_RANKS)


def test_a_session_without_ranks_does_not_look_for_the_names_of_others(session):
    session(PLAIN).assert_outcomes(passed=1, warnings=0)


@pytest.mark.slow
def test_the_controller_of_xdist_warns_and_its_workers_do_not(session):
    result = session(RANKED, "-n", "1")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines([HEAD, OF_RANKS])
    assert _lines(result, "lacks private names") == 1
