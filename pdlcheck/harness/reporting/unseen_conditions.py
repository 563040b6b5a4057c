"""The lines at the end of a session about conditions that no run of a passed check has met. Does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping
from typing import Any

import pytest

from pdlcheck.seen_conditions import listening

__all__ = ["CONDITIONS", "INI_ACCEPTED", "INI_STRICT", "UnseenConditions", "check_ini_values"]

INI_STRICT, INI_ACCEPTED = "pdlcheck_not_seen", "pdlcheck_accept_unseen"

CONDITIONS = "pdlcheck_conditions"  # attribute of a report; pytest-xdist sends it
_LINES = 8  # lines that are shown without -v
_CHOICES = ("report", "fail")

Seen = dict[str, dict[str, bool]]  # check -> condition -> whether a run has met it

_seen = pytest.StashKey[Seen]()


def check_ini_values(config: pytest.Config) -> None:
    """Raise a usage error for an unknown value."""
    value = config.getini(INI_STRICT)
    if value not in _CHOICES:
        raise pytest.UsageError(f"{INI_STRICT} must be one of {', '.join(_CHOICES)}, got {value!r}")
    for line in config.getini(INI_ACCEPTED):
        if not line.partition(": ")[2]:
            raise pytest.UsageError(
                f"{INI_ACCEPTED} has a line for each condition, such as 'check_metric: a rank without samples'; "
                f"got {line!r}"
            )


class UnseenConditions:
    """A plugin of the session that collects the conditions of checks, by test function."""

    def __init__(self, config: pytest.Config) -> None:
        self._accepted = frozenset(config.getini(INI_ACCEPTED))
        self._is_strict = config.getini(INI_STRICT) == "fail"
        self._all_lines = config.getoption("verbose", 0) > 0
        self._of_functions: defaultdict[str, Seen] = defaultdict(dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Collect the conditions of the checks that pass in the body of a test."""
        seen: Seen = {}
        with listening(lambda check, conditions: _add(seen, check, conditions)):
            yield
        if seen:
            item.stash[_seen] = seen

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Store the conditions in the report of a test that passed."""
        report = yield
        if call.when == "call" and report.passed and _seen in item.stash:
            setattr(report, CONDITIONS, item.stash[_seen])
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the conditions of a report to those of the test function."""
        for check, conditions in getattr(report, CONDITIONS, {}).items():
            _add(self._of_functions[report.nodeid.partition("[")[0]], check, conditions)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Let the session fail if it has to."""
        if self._is_strict and not exitstatus and self._lines():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the lines."""
        lines = self._lines()
        shown = lines if self._all_lines or self._is_strict else lines[:_LINES]
        for line in shown:
            terminalreporter.write_line(line, red=self._is_strict)
        if len(shown) < len(lines):
            terminalreporter.write_line(f"... {len(lines) - len(shown)} more such lines with -v")
        if lines and self._is_strict:
            terminalreporter.write_line(
                f"{INI_STRICT} = fail: add cases that meet these conditions; for one that cannot occur, add a line to "
                f"the ini value {INI_ACCEPTED}, such as 'check_metric: a rank without samples'",
                red=True,
            )

    def _lines(self) -> list[str]:
        """Return one line for each check and set of conditions, with the test functions in which it passed."""
        functions: defaultdict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
        for function, seen in self._of_functions.items():
            for check, conditions in seen.items():
                unseen = [
                    words
                    for words, is_met in conditions.items()
                    if not is_met and f"{check}: {words}" not in self._accepted
                ]
                if unseen:
                    functions[check, tuple(unseen)].append(function)
        return [f"{check}: not seen: {', '.join(unseen)} ({_few(of)})" for (check, unseen), of in functions.items()]


def _add(seen: Seen, check: str, conditions: Mapping[str, bool]) -> None:
    known = seen.setdefault(check, {})
    for words, is_met in conditions.items():
        known[words] = known.get(words, False) or is_met


def _few(functions: list[str]) -> str:
    return functions[0] if len(functions) == 1 else f"{functions[0]} and {len(functions) - 1} more"
