"""The file of ``--pdl-json``: one line of JSON for each result, with the fields of failed checks. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pdlcheck.errors import CheckFailed
from pdlcheck.harness.collection import cases
from pdlcheck.harness.reporting.unseen_conditions import CONDITIONS
from pdlcheck.json_values import plain
from pdlcheck.worlds.exceptions import text_of

__all__ = ["FORMAT_VERSION", "JsonRecords"]

FORMAT_VERSION = 1
_RECORD = "pdlcheck_record"  # attribute of a report; pytest-xdist sends it


class JsonRecords:
    """A plugin of the session that writes a record for each body of a test, and for each other failed phase."""

    def __init__(self, path: str, *, is_worker: bool) -> None:
        """Empty the file, unless this is a worker of pytest-xdist, which sends its reports."""
        self._path = Path(path)
        if not is_worker:
            try:
                self._path.write_text("")
            except OSError as error:
                raise pytest.UsageError(f"--pdl-json: cannot write {path}: {error.strerror}") from None
        self._is_worker = is_worker

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the record to the report."""
        report = yield
        if report.when == "call" or report.failed:
            setattr(report, _RECORD, _record(item, call, report))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the record of a report."""
        record = getattr(report, _RECORD, None)
        if record is not None and not self._is_worker:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record | {"outcome": report.outcome}, allow_nan=False) + "\n")


def _record(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> dict[str, Any]:
    case, error = cases.case_of(item), None if call.excinfo is None else call.excinfo.value
    failed = error if isinstance(error, CheckFailed) else None
    replay = dict(report.sections).get("replay")
    check = None if failed is None else failed.fields | {"replay": failed.replay or replay}
    return {
        "version": FORMAT_VERSION,
        "nodeid": report.nodeid,
        "phase": report.when,
        "outcome": report.outcome,
        "world": cases.world_of(item),
        "world_size": None if case is None else case.world_size,
        "duration_s": report.duration,
        "error": None if error is None or report.passed else type(error).__name__,
        "message": text_of(error) if error is not None and report.failed else None,
        "replay": replay,
        "check": None if check is None else {name: plain(value) for name, value in check.items()},
        "conditions": getattr(report, CONDITIONS, None),
    }
