"""The pytest session in each rank process has the options, hooks and settings of the run."""

from __future__ import annotations

import pytest

from . import drawn_by_modules


@pytest.mark.slow
def test_the_users_conftest_options_and_ini_values_hold_in_ranks(pytester):
    folder = pytester.mkdir("deep")
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    parser.addoption('--flavour', default='none')\n    parser.addini('taste', 'help')\n"
    )
    (folder / "test_options.py").write_text(
        """
import pytest, logging

def test_plain():
    logging.getLogger("mine").info("of the controller")

@pytest.mark.world_size(2)
def test_options(request):
    assert request.config.getoption("--flavour") == "sweet"
    assert request.config.getini("taste") == "sour"
    assert request.config.getoption("verbose") == 1
    logging.getLogger("mine").info("to the file")
"""
    )
    strict = "strict_config = true\n" if pytest.version_tuple >= (9,) else ""
    pytester.makeini(
        f"[pytest]\n{strict}faulthandler_timeout = 50\ncache_dir = .c\nlog_file = all.log\nlog_level = INFO\n"
        "addopts = --strict-markers --strict-config --import-mode=importlib\nfilterwarnings = error\n"
    )
    result = pytester.runpytest_subprocess("deep", "--world", "gloo", "--flavour=sweet", "-v", "-o", "taste=sour")
    result.assert_outcomes(passed=2)
    assert "of the controller" in (pytester.path / "all.log").read_text(), "the ranks do not write to the same file"


def test_options_of_every_type_hold_in_ranks(run):
    options = """
import argparse, enum, pathlib

class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"

class Split(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, dict([values.split("=")]))

def pytest_addoption(parser):
    parser.addoption("--data-dir", type=pathlib.Path, default=pathlib.Path("nowhere"))
    parser.addoption("--colour", type=Colour, default=Colour.RED)
    parser.addoption("--pair", type=lambda text: tuple(text.split(",")))
    parser.addoption("--setting", action=Split)
    parser.addoption("--made", type=lambda text: lambda: text)
    parser.addoption("--same", default=lambda: "each rank's own")

def pytest_configure(config):
    config.option.set_by_a_hook = lambda: "each rank's own"
"""
    source = """
@W
def test_options(request):
    option = request.config.getoption
    assert str(option("--data-dir")) == "/data" and option("--colour").name == "BLUE"
    assert option("--pair") == ("a", "b") and option("--setting") == {"one": "1"}
    assert option("--made") is None, "what cannot be pickled is the controller's own"
    assert option("--same")() == request.config.option.set_by_a_hook() == "each rank's own"

@W
def test_next(): pass
"""
    given = ("--data-dir=/data", "--colour=blue", "--pair=a,b", "--setting=one=1", "--made=here", "-W", "default")
    result = run(source, *given, conftest=options)
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*PytestConfigWarning: --made is None in rank processes, as its value <function*"])
    run(source.replace('assert option("--made")', "#"), conftest=options).stdout.no_fnmatch_line("*ConfigWarning*")


def test_options_about_conftest_files_hold_in_ranks(pytester):
    folder = pytester.mkdir("deep")
    (pytester.path / "conftest.py").write_text("raise RuntimeError('above --confcutdir')\n")
    (folder / "conftest.py").write_text(
        """
import pytest

assert True

@pytest.fixture
def name_and_globals():
    return __name__, globals()
"""
    )
    (folder / "test_inner.py").write_text(
        """
import pytest

@pytest.mark.world_size(2)
def test_conftest(name_and_globals):
    name, known = name_and_globals
    assert name == "deep.conftest", "--import-mode=prepend makes it 'conftest'"
    assert "@pytest_ar" not in known, "--assert=rewrite"
"""
    )
    options = ("--confcutdir=deep", "--import-mode=importlib", "--assert=plain", "--rootdir=.", "-p", "no:randomly")
    pytester.runpytest_inprocess("deep", "--world", "gloo", *options).assert_outcomes(passed=1)


def test_ranks_start_where_the_run_started_whatever_folder_a_hook_has_gone_to(pytester):
    folder = pytester.mkpydir("deep")
    (folder / "conftest.py").write_text(
        "import os\n\npytest_plugins = ['deep.more']\n\ndef pytest_sessionstart(session): os.chdir('/')\n"
    )
    (folder / "more.py").write_text("import pytest\n\n@pytest.fixture\ndef more(): return 1\n")
    (folder / "test_inner.py").write_text(
        """
import os, pathlib, pytest

@pytest.mark.world_size(2)
def test_folders(more, request):
    assert request.config.invocation_params.dir == pathlib.Path(__file__).parents[1]
    assert os.getcwd() == "/"
"""
    )
    pytester.runpytest_inprocess("deep", "--world", "gloo", "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_hooks_that_end_a_session_see_its_exit_status_in_ranks(run, pytester):
    hooks = """
import pathlib

def pytest_sessionstart(session):
    assert session.exitstatus == 0

def pytest_sessionfinish(session, exitstatus):
    assert session.exitstatus == exitstatus
    with (session.config.rootpath / "statuses.txt").open("a") as file:
        file.write(f"{int(exitstatus)}\\n")
"""
    run("@W\ndef test_passes(): pass", conftest=hooks).assert_outcomes(passed=1)
    run("@W\ndef test_fails(): assert 0", conftest=hooks).assert_outcomes(failed=1)
    text = (pytester.path / "statuses.txt").read_text()
    assert sorted(text.split()) == ["0"] * 3 + ["1"] * 3


def test_a_hook_may_select_tests_by_what_the_whole_session_has(run):
    hooks = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("error"))
    items[:] = items[1::2]
"""
    source = """
@W
def test_one(): raise AssertionError("not selected")

@W
def test_two(): pass

@W
def test_three(): raise AssertionError("not selected")
"""
    other = "import pytest, warnings\n\n@pytest.mark.world_size(2)\ndef test_%s():\n    warnings.warn('%s')\n"
    result = run(source, conftest=hooks, test_last=other % ("four", "an error by the mark"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*UserWarning: an error by the mark"])


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_pytest_may_be_without_some_of_its_plugins(run, world):
    source = """
@W
def test_good(rank, shared_tmp_path):
    assert shared_tmp_path.is_dir()

@W
def test_bad(rank):
    assert rank == 1

def test_plain():
    pass
"""
    without = [option for name in ("assertion", "capture", "debugging", "tmpdir") for option in ("-p", f"no:{name}")]
    run(source, *without, world=world).assert_outcomes(passed=2, failed=1)


def test_options_of_the_run_do_no_harm(run):
    source = """
@W
def test_good(tmp_path): pass

@W
def test_bad(rank): assert rank == 0

@W
def test_never(): raise AssertionError("not reached")
"""
    run(source, "--setup-show", "-k", "good").assert_outcomes(passed=1, deselected=2)
    run(source, "--setup-plan", "-k", "never").assert_outcomes(deselected=2)
    run(source, "-x").assert_outcomes(passed=1, failed=1)
    run(source, "--maxfail=1", "--log-cli-level=INFO", "--durations=3").assert_outcomes(passed=1, failed=1)


def test_a_failed_comparison_is_explained_as_pytest_does_it(run, monkeypatch):
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)  # with these variables pytest shortens nothing
    source = """
class Coin:
    def __init__(self, cents): self.cents = cents
    def __eq__(self, other): return self.cents == other.cents

@W
def test_mapping(): assert {"a": 1, "b": 2} == {"a": 1, "b": 3}

@W
def test_list(): assert [1, 2, 3] == [1, 2, 4]

@W
def test_approx(): assert 1.5 == pytest.approx(1.0)

@W
def test_hook(rank):
    dist.barrier()
    assert Coin(rank) == Coin(7), "of no worth"
"""
    hooks = """
def pytest_assertrepr_compare(config, op, left, right):
    if type(left).__name__ == "Coin":
        return ["comparing coins", f"cents: {left.cents} != {right.cents}"]

def pytest_assertion_pass(item, lineno, orig, expl):
    print(f"{item.name} passed {orig}")
"""
    result = run(source, conftest=hooks)
    result.assert_outcomes(failed=4)
    text, more = result.stdout.str(), "Use -v to get more diff"
    for words in ("{'b': 2} != {'b': 3}", "At index 2 diff: 3 != 4", "comparison failed", "cents: 0 != 7", more):
        assert words in text, words
    assert more not in run(source, "-vv", conftest=hooks).stdout.str()
    source = "@W\ndef test_passes():\n    assert 1 + 1\n    assert 0"
    result = run(source, "-o", "enable_assertion_pass_hook=true", conftest=hooks)
    result.stdout.fnmatch_lines(["*test_passes?gloo-2? passed 1 + 1"])


@pytest.mark.parametrize("options", [(), ("--isolation", "fresh")], ids=["pool", "fresh"])
def test_what_a_file_draws_when_it_is_imported_differs_between_ranks(run, options):
    run(drawn_by_modules.SOURCE, *options).assert_outcomes(passed=drawn_by_modules.TESTS)
    run(drawn_by_modules.SEEDED, *options).assert_outcomes(passed=1)
