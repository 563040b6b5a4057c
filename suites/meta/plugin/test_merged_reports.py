"""The report of an item on rank processes is a report of pytest's own: its parts, not a text, reach every plugin."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from pdlcheck.harness.reporting.rank_reports import RankReports, as_sent, merge, text_as_sent

CHAINED = """
def convert(text):
    try:
        return int(text)
    except ValueError as error:
        raise RuntimeError("no number") from error

@W
def test_fails(rank):
    text = "a" if rank else "1"
    convert(text)
    dist.barrier()
"""
WRITES = """
import json, pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and type(call.excinfo.value) is RuntimeError:  # on rank 1, and in the controller
        own = sorted(name for name in vars(call.excinfo.value) if not name.startswith("__"))
        with open("attributes.jsonl", "a") as file:
            print(json.dumps(own), file=file)
    return report

def pytest_runtest_logreport(report):
    if report.failed:
        parts = [[[type(entry).__name__ for entry in trace.reprentries], str(crash), description]
                 for trace, crash, description in report.longrepr.chain]
        with open("report.json", "w") as file:
            json.dump([type(report.longrepr).__name__, parts, report.longrepr.sections], file)
"""


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_the_parts_of_a_ranks_report_reach_every_plugin(run, pytester, options):
    result = run(CHAINED, "-p", "no:randomly", "--junit-xml=out.xml", *options, conftest=WRITES)
    result.assert_outcomes(failed=1)
    kind, parts, sections = json.loads((pytester.path / "report.json").read_text())
    assert kind == "ExceptionChainRepr"
    (first, at, link), (second, raised_at, last) = parts
    assert first == ["ReprEntry"]
    assert second == ["ReprEntry", "ReprEntry"]
    assert at.endswith("ValueError: invalid literal for int() with base 10: 'a'")
    assert raised_at.endswith("RuntimeError: no number")
    assert "direct cause" in link
    assert last is None
    (title, text, _) = sections[0]
    assert title == "ranks"
    assert text.splitlines()[0] == "rank 1 of 2 raised this"
    failure = next(ElementTree.parse(pytester.path / "out.xml").iter("failure"))
    assert failure.get("message") == "RuntimeError: no number"
    assert "ValueError: invalid literal" in str(failure.text)


def test_no_attribute_of_ours_is_on_the_users_exception(run, pytester):
    run(CHAINED, conftest=WRITES).assert_outcomes(failed=1)
    lines = (pytester.path / "attributes.jsonl").read_text().splitlines()
    assert lines == ["[]", "[]"]


def test_the_source_is_coloured_as_in_other_reports(run):
    result = run(CHAINED, "--color=yes", "--code-highlight=yes")
    text = result.stdout.str()
    assert "\x1b[1m\x1b[31mE           ValueError: invalid literal" in text
    assert "\x1b[94mraise\x1b[39;49;00m" in text, "pytest colours the source with pygments"


def _report(config: pytest.Config, **more: Any) -> pytest.TestReport:
    """Return the report of a failure that pytest makes of an exception."""
    try:
        raise ValueError("wrong")
    except ValueError:
        shown: Any = pytest.ExceptionInfo.from_current().getrepr()
    return pytest.TestReport("test_a.py::test_b", ("test_a.py", 1, "test_b"), {}, "failed", shown, "call", **more)


def _item(config: pytest.Config) -> Any:
    return SimpleNamespace(config=config, nodeid="test_a.py::test_b", location=("test_a.py", 1, "test_b"))


def test_a_report_travels_as_json_and_its_error_is_known_by_identity(pytestconfig):
    reports, error = RankReports(_item(pytestconfig)), ValueError("wrong")
    sent = json.loads(json.dumps(as_sent(pytestconfig, _report(pytestconfig)), default=str))
    assert reports.receive("call", {1: [sent]}) == {}
    reports.blame(1, error)
    merged = reports.merged(error)
    assert merged is not None
    assert merged.outcome == "failed"
    assert "ValueError: wrong" in merged.longreprtext
    assert reports.merged(ValueError("wrong")) is None, "another exception"
    assert reports.of(0) is None


def test_a_failure_without_a_traceback_has_the_message_of_the_summary(pytestconfig):
    reports, error = RankReports(_item(pytestconfig)), LookupError()
    reports.receive("setup", {0: [text_as_sent("no frames\nE   LookupError: lost", "LookupError: lost")]})
    reports.blame(0, error)
    merged = reports.merged(error)
    assert merged is not None
    assert merged.when == "setup"
    longrepr: Any = merged.longrepr
    assert longrepr.reprcrash.message == "LookupError: lost"
    assert longrepr.reprcrash.path == "test_a.py"


def test_words_that_are_no_report_are_ignored(pytestconfig):
    reports: Any = RankReports(_item(pytestconfig))
    assert reports.receive("call", {0: ["no report", {"report": {"longrepr": None}}]}) == {}
    assert reports.of(0) is None


def test_notes_are_added_once_and_only_if_the_rank_has_not_shown_them(pytestconfig):
    report = _report(pytestconfig)
    for _ in range(2):
        merge(report, ["ValueError: wrong", "rank 0 of 2 raised this"])
    longrepr: Any = report.longrepr
    assert longrepr.sections == [("ranks", "rank 0 of 2 raised this", "-")]


def test_a_failure_by_a_hook_alone_is_returned_with_its_text(pytestconfig):
    reports = RankReports(_item(pytestconfig))
    failed = _report(pytestconfig)
    failed.longrepr = "it must fail"
    assert reports.receive("call", {1: [as_sent(pytestconfig, failed, by_hook=True)]}) == {1: "it must fail"}
