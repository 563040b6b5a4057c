"""The reports that ranks send of failed phases, and the one report of the item that the controller makes of them.

A rank sends its :class:`pytest.TestReport` as pytest-xdist's workers do: serialized by pytest's own hook. So the
controller has the traceback, the location and the sections as pytest rendered them where the source and the values
are, and reporters of any plugin read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from pdlcheck.compat.pytest.reports import ExceptionRepr, ReprEntry, ReprExceptionInfo, ReprFileLocation, ReprTraceback

__all__ = ["RankReports", "Sent", "add_notes", "as_sent", "merge", "rank_reports", "show_text", "text_as_sent"]

Sent = Mapping[str, Any]  # what JSON carries of one report

_NOT_AGAIN: Mapping[str, Any] = {
    "keywords": {},
    "sections": [],
    "user_properties": [],
}  # the controller has these already


def as_sent(config: pytest.Config, report: pytest.TestReport, *, by_hook: bool = False) -> Sent:
    """Return what a rank sends of the report of a failed phase.

    Args:
        config: the configuration of the rank's session.
        report: the report.
        by_hook: the phase itself passed, and a user's hook has failed it.
    """
    if not isinstance(report.longrepr, ExceptionRepr):  # pytest would send it without a message for the summary
        text = report.longreprtext
        said = [line for line in text.splitlines() if line.startswith("E ")]  # as in "fixture not found"
        message = said[0].removeprefix("E").strip() if said else None
        return text_as_sent(text, message, expected=getattr(report, "wasxfail", None), by_hook=by_hook)
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    return {"report": data | _NOT_AGAIN, "by_hook": by_hook}


def text_as_sent(text: str, message: str | None, *, expected: str | None = None, by_hook: bool = False) -> Sent:
    """Return what a rank sends of a failure without a traceback, such as a file that it cannot load.

    Args:
        text: what to show.
        message: the line for pytest's summary; None for no line.
        expected: the reason of an xfail mark, if the failure was expected.
        by_hook: the phase itself passed, and a user's hook has failed it.
    """
    return {"text": text, "message": message, "expected": expected, "by_hook": by_hook}


class RankReports:
    """The reports of the ranks of one item, of the phase that ran last."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._of_ranks: dict[int, pytest.TestReport] = {}
        self._first: tuple[BaseException, int] | None = None

    def receive(self, when: str, sent: Mapping[int, Sequence[Sent]]) -> dict[int, str]:
        """Take the reports that the ranks sent in a phase; return the texts of those that only a hook has failed."""
        self._of_ranks = {}
        by_hook = {}
        for rank, reports in sorted(sent.items()):
            for one in reports:  # the last one is that of the failure that ended the phase
                with suppress(Exception):  # a process that the rank forked may have written to the journal
                    self._of_ranks[rank] = report = self._read(when, one)
                    if one["by_hook"]:
                        by_hook[rank] = report.longreprtext
        return by_hook

    def of(self, rank: int) -> pytest.TestReport | None:
        """Return the report of a rank whose phase failed; None if the rank has sent none."""
        return self._of_ranks.get(rank)

    def blame(self, rank: int, error: BaseException) -> None:
        """Record that the controller raises ``error`` for the failure of ``rank``, the first cause."""
        self._first = error, rank

    def merged(self, error: BaseException) -> pytest.TestReport | None:
        """Return the merged report if ``error`` was raised for a rank that has sent its report."""
        if self._first is None or self._first[0] is not error or self._first[1] not in self._of_ranks:
            return None
        return merge(self._of_ranks[self._first[1]], getattr(error, "__notes__", ()))

    def _read(self, when: str, sent: Sent) -> pytest.TestReport:
        config, item = self._item.config, self._item
        if "report" in sent:
            read: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=sent["report"])
            return read
        report = pytest.TestReport(
            item.nodeid,
            item.location,
            {},
            "failed",
            show_text(item, sent["text"], sent["message"]),
            when,  # type: ignore[arg-type]  # one of three words
        )
        if sent["expected"] is not None:
            report.outcome, report.wasxfail = "skipped", sent["expected"]
        return report


_reports = pytest.StashKey[RankReports]()


def rank_reports(item: pytest.Item) -> RankReports:
    """Return the reports of the item's ranks."""
    if _reports not in item.stash:
        item.stash[_reports] = RankReports(item)
    return item.stash[_reports]


def merge(first: pytest.TestReport, notes: Sequence[str]) -> pytest.TestReport:
    """Return the report of all ranks: that of the first cause, with a section about the others.

    Args:
        first: the report of the rank that failed first.
        notes: lines about all ranks, as :func:`pdlcheck.worlds.outcome.results` adds them to the exception.
    """
    assert isinstance(first.longrepr, ExceptionRepr)
    add_notes(first.longrepr, notes)
    return first


def add_notes(shown: ExceptionRepr, notes: Sequence[str]) -> None:
    """Add a section with those notes of an exception that its representation does not show."""
    lines = {line.removeprefix("E").strip() for line in str(shown).splitlines()}
    new = [str(note) for note in notes]
    new = [note for note in new if not lines.issuperset(line.strip() for line in note.splitlines())]
    if new:
        shown.addsection("ranks", "\n".join(new))


def show_text(item: pytest.Item, text: str, message: str | None) -> ReprExceptionInfo:
    """Return a representation for a report that shows ``text`` at the item's location, with pytest's colours."""
    entry = ReprEntry(text.splitlines(), None, None, None, "long")
    crash = ReprFileLocation(item.location[0], (item.location[1] or 0) + 1, message or "")
    return ReprExceptionInfo(ReprTraceback([entry], None, "long"), crash if message else None)
