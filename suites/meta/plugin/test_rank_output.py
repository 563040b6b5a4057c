"""Output, logs, warnings and properties of rank processes, as users read them in the single report."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

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
    """Return (title, text) of each captured section of the reports, in order."""
    sections, title = [], None
    for line in lines:
        if line.startswith("---"):
            title = line.strip("- ")
            sections.append((title, []))
        elif line[:3] in ("===", "___") or line.startswith("pdlcheck: tests that ran on ranks"):
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


@pytest.mark.slow
def test_ranks_print_any_letter_in_any_locale_as_under_pytests_capture(pytester, monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    pytester.makepyfile(
        r"""
        import sys, pytest
        @pytest.mark.world_size(2)
        def test_prints(rank):
            print("gr\xfcn \ud800")
            print("r\xf6t \ud800", file=sys.stderr)
        """
    )
    result = pytester.runpytest_inprocess("--world", "gloo", "--junit-xml=out.xml", "-o", "junit_logging=all")
    result.assert_outcomes(passed=1)
    said = ET.parse(pytester.path / "out.xml").find(".//testcase")
    assert "gr\xfcn ?" in said.findtext("system-out")
    assert "r\xf6t \\ud800" in said.findtext("system-err")


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
    until = time.monotonic() + 60
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
    result.assert_outcomes(passed=7, warnings=3)
    result.stdout.fnmatch_lines(["*Mine: on all ranks", "*Mine: on one rank", "*incompatible with junit_family*"])


RECORDED = """
@W
def test_it(rank, request, record_property, record_xml_attribute, record_testsuite_property):
    record_property("same", 1)
    record_property("rank", rank)
    request.node.user_properties.append(("own", 2))
    record_xml_attribute("tested", "this")
    record_xml_attribute("of", rank)
    record_testsuite_property("host", "one")
    record_testsuite_property("rank", rank)
    request.node.add_report_section("call", "notes", "agreed")
    request.node.add_report_section("call", "notes", f"by {rank}")

@pytest.mark.world_size(3)
def test_on_other_ranks(record_testsuite_property):
    record_testsuite_property("host", "one")
"""


def test_what_tests_add_to_reports_and_xml_is_told_once_where_ranks_agree(run):
    result = run(RECORDED, "--junit-xml=report.xml", "-o", "junit_family=xunit1", "-rA")
    result.assert_outcomes(passed=2)
    suite = ET.parse("report.xml").getroot()[0]
    names = {place: [found.get("name") for found in suite.iterfind(f"{place}property")] for place in ("*/", "*/*/")}
    assert names["*/"] == ["host", "rank [rank 0]", "rank [rank 1]"]
    assert names["*/*/"] == ["same", "rank [rank 0]", "own", "rank [rank 1]"]
    case = next(suite.iter("testcase"))
    assert (case.get("tested"), case.get("of")) == ("this", "0 [rank 0], 1 [rank 1]")
    result.stdout.fnmatch_lines(
        [
            *("*- Captured notes call -*", "agreed"),
            *("*- Captured notes call [[]rank 0] -*", "by 0"),
            *("*- Captured notes call [[]rank 1] -*", "by 1"),
        ],
        consecutive=True,
    )


def test_setup_show_shows_the_fixtures_of_ranks(run):
    source = """
@pytest.fixture(params=["a"])
def mine(request, rank): return request.param

@W
def test_show(mine): pass

@W
def test_nothing_of_the_users(rank): pass
"""
    result = run(source, "--setup-show")
    result.assert_outcomes(passed=2)
    begin = next(number for number, line in enumerate(result.outlines) if "SETUP" in line)
    lines = [line.strip().replace(") .", ").") for line in result.outlines[begin : begin + 8]]  # pytest 9 has the blank
    assert lines == [
        "SETUP    F rank",
        "SETUP    F mine (fixtures used: rank)['a']",
        "test_inner.py::test_show[a-gloo-2] (fixtures used: mine, rank, request).",
        "TEARDOWN F mine['a']",
        "TEARDOWN F rank",
        "SETUP    F rank",
        "test_inner.py::test_nothing_of_the_users[gloo-2] (fixtures used: rank).",
        "TEARDOWN F rank",
    ]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_ranks_record_alike_is_told_once_and_else_with_the_rank(run, world):
    run(
        """
@pytest.fixture
def recorded(record_property):
    record_property("set up", 1)
    yield record_property
    record_property("torn down", 2)

@W
def test_same(recorded):
    recorded("same", 3)

@W
def test_own(rank, recorded):
    dist.barrier()
    if rank == 1:
        recorded("own", rank)
""",
        *("--junit-xml=report.xml", "-o", "junit_family=xunit1"),
        world=world,
    ).assert_outcomes(passed=2)
    same, own = (
        [(found.get("name"), found.get("value")) for found in case.iter("property")]
        for case in ET.parse("report.xml").iter("testcase")
    )
    assert same == [("set up", "1"), ("same", "3"), ("torn down", "2")]
    assert own == [("set up", "1"), ("own [rank 1]", "1"), ("torn down", "2")]


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_any_value_may_be_recorded(run, world):
    run(
        """
@W
def test_it(record_property):
    record_property("shapes", {(1, 2): 3})
    record_property("loop", [])
    loop = []
    loop.append(loop)
    record_property("loop", loop)
""",
        *("--junit-xml=report.xml", "-o", "junit_family=xunit1"),
        world=world,
    ).assert_outcomes(passed=1)
    case = next(ET.parse("report.xml").iter("testcase"))
    assert [found.get("value") for found in case.iter("property")] == ["{(1, 2): 3}", "[]", "[[...]]"]
