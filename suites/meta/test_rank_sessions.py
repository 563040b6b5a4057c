"""The pytest session in each rank process, seen from outside: what the user's tests and plugins find there."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

# the inner runs forget the modules that they import: what keeps state must be there before
import pdlcheck.harness.processes
import pdlcheck.harness.simulated  # noqa: F401

HEAD = """
import logging, os, sys, warnings
import pytest, torch, torch.distributed as dist
W = pytest.mark.world_size(2)
"""


@pytest.fixture
def run(pytester):
    """Write a test file, run it on rank processes in a pytest of its own."""

    def run(source, *options, world="gloo", **files):
        pytester.makepyfile(test_inner=HEAD + source, **files)
        # in this process, and where the project is installed in place, pytest finds its files imported already
        quiet = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
        return pytester.runpytest_inprocess("--world", world, "-p", "no:cacheprovider", *quiet, *options)

    return run


OUTPUT = """
print("imported")

@pytest.fixture(scope="module")
def speaking():
    print("set up")
    yield
    print("torn down")

@W
def test_passes(rank, speaking):
    print(f"python of {rank}")
    os.system(f"echo child of {rank}")
    os.write(2, b"descriptor 2 of %d\\n" % rank)
    logging.getLogger("mine").warning("log of %d", rank)

@W
def test_fails(rank, speaking):
    print(f"printed by {rank}")
    logging.getLogger("mine").warning("logged by %d", rank)
    dist.barrier()
    assert rank == 0

@W
def test_dies(rank):
    print(f"last words of {rank}")
    logging.getLogger("mine").error("last log of %d", rank)
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
"""


def _sections(lines):
    """Title -> text of each captured section, of the reports in order."""
    sections, title = [], None
    for line in lines:
        if line.startswith("---"):
            title = line.strip("- ")
            sections.append((title, []))
        elif line[:3] in ("===", "___"):
            title = None
        elif title is not None:
            sections[-1][1].append(line)
    return [(title, "\n".join(text)) for title, text in sections if title.startswith("Captured")]


def test_what_ranks_write_and_log_are_sections_of_the_report(run):
    result = run(OUTPUT, "-rA")
    result.assert_outcomes(passed=1, failed=2)
    assert "imported" not in result.stdout.str(), "the controller imports the file, the ranks need not tell of it"
    sections = _sections(result.outlines)
    for rank in range(2):
        for title, text in [
            (f"Captured stdout setup [rank {rank}]", "set up"),
            (f"Captured stdout call [rank {rank}]", f"python of {rank}\nchild of {rank}"),
            (f"Captured stderr call [rank {rank}]", f"descriptor 2 of {rank}"),
            (f"Captured log call [rank {rank}]", f"WARNING  mine:test_inner.py:18 log of {rank}"),
            (f"Captured stdout call [rank {rank}]", f"printed by {rank}"),
            (f"Captured log call [rank {rank}]", f"WARNING  mine:test_inner.py:23 logged by {rank}"),
            (f"Captured stdout call [rank {rank}]", f"last words of {rank}"),
            (f"Captured log call [rank {rank}]", f"ERROR    mine:test_inner.py:30 last log of {rank}"),
        ]:
            assert sections.count((title, text)) == 1, f"{title}: {text!r} is not once in {sections}"


def test_what_ranks_write_is_in_the_xml_of_passing_tests_too(run, pytester):
    run(OUTPUT, "--junit-xml=report.xml", "-o", "junit_logging=all")
    cases = {case.get("name"): case for case in ET.parse(pytester.path / "report.xml").iter("testcase")}
    assert list(cases) == ["test_passes[gloo-2]", "test_fails[gloo-2]", "test_dies[gloo-2]"]
    out = cases["test_passes[gloo-2]"].findtext("system-out")
    for text in ("[rank 0]\npython of 0\nchild of 0\n", "[rank 1]\npython of 1\nchild of 1\n", "log of 1"):
        assert out.count(text) == 1, out
    assert cases["test_passes[gloo-2]"].findtext("system-err").count("descriptor 2 of") == 2
    assert cases["test_fails[gloo-2]"].find("failure") is not None


def test_without_capture_lines_appear_while_the_test_runs_with_the_rank_before_them(run):
    result = run(
        """
import time
@W
def test_live(rank, capsys):
    with capsys.disabled():
        print(f"first of {rank}")
    os.write(1, b"no end of line")
    os.write(2, b"later\\n")

@W
def test_while_it_runs(rank):
    print("begun")
    until = time.monotonic() + 10
    while not os.path.exists("heard"):
        assert time.monotonic() < until, "the line did not appear"
        time.sleep(0.01)
""",
        "-s",
        "-v",
        conftest="""
import pathlib, sys

class Ear:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        if "[rank 1] begun" in text:
            pathlib.Path("heard").touch()
        return self.stream.write(text)
    def __getattr__(self, name):
        return getattr(self.stream, name)

def pytest_runtest_call():
    sys.stdout = Ear(sys.stdout)
""",
    )
    result.assert_outcomes(passed=2)
    lines = result.stdout.str()
    for text in ("[rank 0] first of 0\n", "[rank 1] first of 1\n", "[rank 1] no end of line\n", "[rank 0] begun\n"):
        assert lines.count(text) == 1, lines
    assert "Captured" not in lines
    result.stderr.fnmatch_lines(["[[]rank 0] later"])


def test_pytests_own_fixtures_and_warnings_work_in_ranks(run):
    result = run(
        """
class Mine(UserWarning):
    pass

@W
def test_captures(capfd, capsys_of, caplog, recwarn):
    os.write(1, b"bytes")
    assert capfd.readouterr().out == "bytes"
    logging.warning("logged")
    assert caplog.messages == ["logged"]
    warnings.warn("recorded")
    assert len(recwarn) == 1

@pytest.fixture
def capsys_of():
    return None

@W
def test_capsys(capsys):
    print("text")
    assert capsys.readouterr().out == "text\\n"

@W
def test_everywhere():
    warnings.warn("on all ranks", Mine)

@W
def test_on_one(rank):
    if rank == 1:
        warnings.warn("on one rank", Mine)

@W
@pytest.mark.filterwarnings("error::UserWarning")
def test_error():
    with pytest.raises(Mine):
        warnings.warn("raised", Mine)

@W
@pytest.mark.filterwarnings("ignore:unimportant")
def test_ignored():
    warnings.warn("unimportant")

@W
def test_properties(rank, record_property):
    record_property("same", 1)
    record_property("rank", rank)
""",
        "--junit-xml=report.xml",
    )
    result.assert_outcomes(passed=7, warnings=2)
    result.stdout.fnmatch_lines(["*Mine: on all ranks", "*Mine: on one rank"])
    names = [found.get("name") for found in ET.parse("report.xml").iter("property")]
    assert names == ["same [rank 0]", "rank [rank 0]", "same [rank 1]", "rank [rank 1]"]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_tmp_path_is_the_ranks_own_and_shared_tmp_path_is_one(run, world, pytester):
    source = """
@W
def test_paths(rank, tmp_path, shared_tmp_path, tmp_path_factory):
    (tmp_path / "mine").write_text(str(rank))
    (shared_tmp_path / str(rank)).write_text("")
    paths = [None, None]
    dist.all_gather_object(paths, (str(tmp_path), str(shared_tmp_path)))
    assert paths[0][0] != paths[1][0] and paths[0][1] == paths[1][1]
    assert (tmp_path / "mine").read_text() == str(rank)
    assert sorted(os.listdir(shared_tmp_path)) == ["0", "1"]
    assert tmp_path_factory.mktemp("more").is_dir()

@W
def test_shared_is_new(shared_tmp_path):
    assert os.listdir(shared_tmp_path) == []

@W
def test_fails(rank, tmp_path, shared_tmp_path):
    (tmp_path / "kept").write_text("")
    (shared_tmp_path / "kept").write_text("")
    dist.barrier()
    assert rank == 0
"""
    base = pytester.path / "base"
    result = run(source, f"--basetemp={base}", "-o", "tmp_path_retention_policy=failed", world=world)
    result.assert_outcomes(passed=2, failed=1)
    kept = sorted(path.parent.name for path in base.rglob("kept") if "current" not in str(path))
    assert [name[:10] for name in kept] == ["test_fails"] * (3 if world == "gloo" else len(kept)), kept
    assert not list(base.rglob("mine")), "the folders of tests that passed are gone"
    assert all("shared" not in path.name for path in base.iterdir() if "test_paths" in path.name)


def test_fixtures_of_every_scope_are_set_up_and_torn_down_when_pytest_does_it(pytester):
    package = pytester.mkpydir("package")
    (package / "conftest.py").write_text(
        """
import os, pytest, torch.distributed as dist

def tell(what):
    if dist.is_initialized():
        with open(os.path.join(os.path.dirname(__file__), f"log{dist.get_world_size()}-{dist.get_rank()}"), "a") as log:
            print(what, file=log)

def make(scope):
    @pytest.fixture(scope=scope, name=scope + "_thing")
    def thing():
        tell(f"+{scope}")
        yield scope
        tell(f"-{scope}")
    return thing

session_thing, package_thing, module_thing, class_thing, function_thing = map(
    make, ["session", "package", "module", "class", "function"])

@pytest.fixture(autouse=True)
def automatic(session_thing, package_thing):
    yield

@pytest.fixture(params=["a", "b"], scope="module")
def letter(request):
    tell(f"+{request.param}")
    yield request.param
    tell(f"-{request.param}")

def pytest_sessionfinish():
    tell("finish")
"""
    )
    (package / "test_one.py").write_text(
        """
import pytest
from package.conftest import tell

@pytest.mark.world_size(2)
class TestClass:
    def test_first(self, class_thing, function_thing): tell("first")
    def test_second(self, class_thing): tell("second")

@pytest.mark.world_size(2)
def test_letter(module_thing, letter): tell(letter)
"""
    )
    (package / "test_two.py").write_text(
        """
import pytest
from package.conftest import tell

@pytest.mark.world_size(3)
def test_on_three(): tell("three")

@pytest.mark.world_size(2)
def test_last(module_thing): tell("last")

@pytest.mark.world_size(2)
@pytest.mark.parametrize("x", [1, 2], ids=["one", "two"])
def test_ids(x, request): assert request.node.name == f"test_ids[gloo-2-{['one', 'two'][x - 1]}]"

def test_without_ranks(): pass
"""
    )
    options = ("--world", "gloo", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=9)
    expected = "+session +package +class +function first -function second -class +module +a a -a +b b -b -module "
    expected += "+module last -module -package -session finish"
    for rank in range(2):
        assert (package / f"log2-{rank}").read_text().split() == expected.split()
    only_one = ["+session", "+package", "three", "-package", "-session", "finish"]
    assert (package / "log3-2").read_text().split() == only_one


def test_an_error_in_a_late_teardown_belongs_to_the_test_that_pytest_blames(run):
    result = run(
        """
@pytest.fixture(scope="module")
def broken(rank_of):
    yield
    if dist.get_rank() == 1:
        raise OSError("cannot give it back")

@pytest.fixture(scope="module")
def rank_of():
    yield

@W
def test_one(broken): pass

@W
def test_two(broken): pass
""",
        test_later=HEAD + "@W\ndef test_three(): pass",
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_two?gloo-2?*", "*OSError: cannot give it back*"])


VERDICTS = """
pytest.importorskip("torch")

class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__("unsendable")

@W
def test_all_skip(): pytest.skip("nobody")

@W
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("not this one")
    dist.barrier()

@W
def test_a_failure_counts_more_than_a_skip(rank):
    if rank == 1:
        pytest.skip("not this one")
    assert rank == 1, "a real failure"

@W
@pytest.mark.skipif(True, reason="by a mark")
def test_skipif(): raise AssertionError

@W
def test_importorskip(): pytest.importorskip("no_such_module")

@W
@pytest.mark.xfail(run=False, reason="not run")
def test_not_run(): os.abort()

@W
@pytest.mark.xfail(strict=True, reason="strict")
def test_strict(): pass

@W
@pytest.mark.xfail(strict=False, reason="lenient")
def test_lenient(): pass

@W
@pytest.mark.xfail(raises=Unsendable, reason="its class")
def test_raises_of_xfail(rank): raise Unsendable(1, 2)

@W
@pytest.mark.xfail(raises=KeyError, reason="on one rank only")
def test_another_failure(rank):
    if rank == 0:
        raise KeyError
    raise ValueError("not expected")

@W
def test_late_mark(request):
    request.node.add_marker(pytest.mark.xfail(reason="marked late"))
    assert 0

@W
def test_late_strict_mark(request):
    request.node.add_marker(pytest.mark.xfail(reason="marked late", strict=True))

@W
def test_xfail_call(rank):
    if rank == 0:
        pytest.xfail("called")
    dist.barrier()

@W
def test_raises_on_one(rank, monkeypatch):
    monkeypatch.setenv("MINE", str(rank))
    if rank == 1:
        with pytest.raises(KeyError):
            raise KeyError
    dist.barrier()
    assert os.environ["MINE"] == str(rank)

def test_monkeypatch_is_undone(world):
    assert world.run(os.environ.get, "MINE", world_size=2) == [None, None]
"""


def test_one_verdict_is_made_of_those_of_the_ranks(run):
    result = run(VERDICTS, "-rsxXf", "-v")
    # failed: a failure beside a skip, strict, another failure, the late strict mark
    result.assert_outcomes(skipped=4, failed=4, xfailed=4, xpassed=1, passed=2)
    text = result.stdout.str()
    for words in (
        "SKIPPED [1] test_inner.py:11: nobody",
        "SKIPPED [1] test_inner.py:14: rank 1 of 2 skipped: not this one",
        "AssertionError: a real failure",
        "could not import 'no_such_module'",
        "[XPASS(strict)] strict",
        "XFAIL test_inner.py::test_raises_of_xfail[gloo-2] - its class",
        "ValueError: not expected",
        "XFAIL test_inner.py::test_late_mark[gloo-2] - marked late",
        "[XPASS(strict)] marked late",
    ):
        assert words in text, words


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 8 has no subtests; install pytest 9")
def test_a_failing_subtest_fails_the_test_and_names_its_rank(run):
    result = run(
        """
@W
def test_some(subtests, rank):
    for i in range(3):
        with subtests.test("step", i=i):
            dist.barrier()
            assert i != 1 or rank == 0
            assert i != 2

@W
def test_good(subtests):
    with subtests.test("step"):
        pass
"""
    )
    text = result.stdout.str()
    text = text.replace("'", "")  # only some releases quote the values
    assert "SUBFAILED[rank 1: step] (i=1) test_inner.py::test_some[gloo-2]" in text
    assert text.count("SUBFAILED[step] (i=2)") == 1, "what fails in the same way on all ranks is told once"
    assert "contains 2 failed subtests" in text
    outcomes = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (1, 3)


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
