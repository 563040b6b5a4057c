"""The number of messages that a test on processes takes; no report depends on it."""

from __future__ import annotations

import pytest

from pdlcheck.worlds.processes.ranks import ProcessRanks

HEAD = "import pytest\npytestmark = pytest.mark.world_size(2)\n"


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs a file on gloo, and returns its result and the messages that it took."""
    outcomes, sent = ProcessRanks.outcomes, []

    def counted(self, fn, *args, **kwargs):
        if getattr(fn, "__module__", "") == "pdlcheck.item_runners.processes.rank.session":
            sent.append(fn.__name__)
        return outcomes(self, fn, *args, **kwargs)

    def run(source, conftest=""):
        monkeypatch.setattr(ProcessRanks, "outcomes", counted)
        pytester.makeconftest(conftest)
        pytester.makepyfile(HEAD + source)
        return pytester.runpytest_inprocess("--world", "gloo", "-p", "no:cacheprovider", "-s"), " ".join(sent)

    return run


def test_a_body_with_our_fixtures_alone_takes_one_message(run):
    source = "@pytest.mark.parametrize('x', [1, 2])\ndef test_a(rank, world_size, x): assert rank < world_size"
    result, messages = run(source)
    result.assert_outcomes(passed=2)
    assert messages.startswith("collect run run")


def test_a_fixture_of_the_users_has_phases_of_its_own(run):
    result, messages = run("@pytest.fixture\ndef one(): yield 1\ndef test_a(rank, one): assert one == 1")
    result.assert_outcomes(passed=1)
    assert messages.startswith("collect setup call teardown")


def test_a_hook_of_a_conftest_file_has_phases_of_its_own(run):
    hook = """
def pytest_runtest_setup(item):
    from pdlcheck.harness.collection.cases import runs_in_a_rank
    if runs_in_a_rank(item.config):
        raise ValueError("not ready")
"""
    result, messages = run("def test_a(rank): pass", hook)
    result.assert_outcomes(errors=1)
    assert messages.startswith("collect setup teardown")
    result.stdout.fnmatch_lines(["*ERROR at setup of test_a*"])


def test_a_failure_on_one_rank_is_one_failure_and_the_next_test_passes(run):
    result, messages = run("def test_a(rank): assert rank == 0\ndef test_b(rank): pass")
    result.assert_outcomes(failed=1, passed=1)
    assert messages.startswith("collect run teardown run")


def test_what_ends_with_the_last_test_of_a_file_is_told_as_its_teardown(run):
    result, messages = run(
        """
@pytest.fixture(scope="module")
def wide():
    yield
    raise ValueError("wide would not end")

def test_a(rank, wide): pass
def test_b(rank): pass
"""
    )
    result.assert_outcomes(passed=2, errors=1)
    assert messages.startswith("collect setup call teardown run teardown")
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_b*"])


def test_a_hook_of_a_folder_does_not_count_in_another(run, pytester):
    for folder in ("with_hook", "without"):
        pytester.mkdir(folder).joinpath(f"test_{folder}.py").write_text(HEAD + "def test_a(rank): pass")
    pytester.path.joinpath("with_hook", "conftest.py").write_text("def pytest_runtest_setup(item): pass")
    result, messages = run("def test_a(rank): pass")
    result.assert_outcomes(passed=3)
    assert messages.startswith("collect run collect setup call teardown collect run")
