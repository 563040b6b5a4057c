"""The annotations of ``--pdl-github``: GitHub shows each failed test at its line of the change. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["GithubAnnotations"]

_ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_ESCAPES_OF_PROPERTIES = {**_ESCAPES, ":": "%3A", ",": "%2C"}


class GithubAnnotations:
    """A plugin of the session that prints a workflow command of GitHub Actions for each failed phase of a test.

    Paths in the commands are relative to ``GITHUB_WORKSPACE``, the clone in which a workflow runs.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._workspace = Path(os.environ.get("GITHUB_WORKSPACE") or config.rootpath)
        self._commands: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the command of a failed phase."""
        if report.failed:
            self._commands.append(self._command(report))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the commands at the beginnings of lines, where GitHub looks for them."""
        if self._commands:
            terminalreporter.ensure_newline()
        for command in self._commands:
            terminalreporter.write_line(command)

    def _command(self, report: pytest.TestReport) -> str:
        crash = getattr(report.longrepr, "reprcrash", None)
        path, line, _ = report.location
        place, number = self._root / path, (line or 0) + 1
        if crash is not None and self._root in (crashed := self._root / crash.path).parents:
            place, number = crashed, crash.lineno
        message = report.longreprtext if crash is None else crash.message
        properties = {
            "file": Path(os.path.relpath(place, self._workspace)).as_posix(),
            "line": str(number),
            "title": report.nodeid if report.when == "call" else f"{report.nodeid}, {report.when}",
        }
        told = ",".join(f"{name}={_escaped(value, _ESCAPES_OF_PROPERTIES)}" for name, value in properties.items())
        return f"::error {told}::{_escaped(message, _ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(letter, letter) for letter in text)
