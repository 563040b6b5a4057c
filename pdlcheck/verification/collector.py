"""The pytest plugin of one run: it keeps the requested items, counts examples, and makes records."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import statistics

from pdlcheck.harness.collection.cases import case_of
from pdlcheck.harness.running.examples import is_property
from pdlcheck.report.progress import Display
from pdlcheck.report.records import Key, PropertyRecord

__all__ = ["Collector"]

NO_WORLD = "-"
_listener: Any = statistics.collector  # Hypothesis declares it as a variable that is always None


@dataclass
class _Running:
    """The state of a test that has not ended."""

    key: Key
    examples: int = 0
    seconds: float = 0.0
    outcome: Literal["holds", "fails", "skipped"] = "holds"
    details: list[str] = field(default_factory=list)


class Collector:
    """Reports every test to ``display``, and keeps a record of it in ``records``.

    Args:
        display: receives the start and the end of every test.
        primitives: only their tests run; empty means all tests. A name without any test is stored in ``unknown``, and
            then no test runs.
        replay: returns the command for a node id in a world.
    """

    def __init__(self, display: Display, primitives: Sequence[str], replay: Callable[[str, str], str]) -> None:
        self.records: list[PropertyRecord] = []
        self.known: set[str] = set()
        self.unknown = ""
        self.internal_error = ""
        self._display = display
        self._primitives = primitives
        self._replay = replay
        self._running: dict[str, _Running] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Send the output of pytest's own reporter to ``os.devnull``; plugins read settings from the reporter."""
        config.pluginmanager.unregister(name="terminalreporter")
        self._void = open(os.devnull, "w")  # noqa: SIM115  # closed in pytest_unconfigure
        config.pluginmanager.register(pytest.TerminalReporter(config, self._void), "terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Close the file of the silent reporter."""
        self._void.close()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep only the tests of the requested primitives."""
        self.known = {_key(item)[0] for item in items}
        self.unknown = next((name for name in self._primitives if name not in self.known), "")
        if self.unknown:
            items.clear()
        elif self._primitives:
            dropped = [item for item in items if _key(item)[0] not in self._primitives]
            items[:] = [item for item in items if _key(item)[0] in self._primitives]
            config.hook.pytest_deselected(items=dropped)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the display with the number of tests for each primitive and world."""
        if self.unknown:
            return
        self._running = {item.nodeid: _Running(_key(item)) for item in session.items}
        self._display.begin(Counter(running.key for running in self._running.values()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that could not be collected as a failure."""
        if report.failed:
            self.records.append(
                PropertyRecord(report.nodeid, report.nodeid, NO_WORLD, "fails", 0, 0.0, report.longreprtext)
            )

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep an error of pytest itself."""
        self.internal_error = f"pytest stopped with an error of its own:\n{excrepr}"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report the start of a test to the display."""
        self._display.running(self._running[nodeid].key)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Count examples in this process, because Hypothesis draws them here whatever world runs them."""
        running = self._running[pyfuncitem.nodeid]
        if not is_property(pyfuncitem):
            running.examples = 1
            return (yield)

        running.examples = len(getattr(pyfuncitem.obj, "hypothesis_explicit_examples", ()))
        outer = _listener.value

        def note(found: Any) -> None:
            running.examples += _executed(found)
            if outer is not None:
                outer(found)

        with _listener.with_value(note):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the report of one phase to the state of its test."""
        running = self._running[report.nodeid]
        running.seconds += report.duration
        if report.failed:
            running.outcome = "fails"
            running.details.append(_failure(report))
        elif report.skipped and running.outcome == "holds":
            running.outcome = "skipped"
            running.examples = 0
            running.details.append(_reason(report))
        if report.when == "teardown":
            self._end(report.nodeid, running)

    def _end(self, nodeid: str, running: _Running) -> None:
        primitive, world = running.key
        replay = self._replay(nodeid, world) if running.outcome == "fails" else ""
        record = PropertyRecord(
            nodeid,
            primitive,
            world,
            running.outcome,
            running.examples,
            running.seconds,
            "\n".join(running.details),
            replay,
        )
        self.records.append(record)
        self._display.done(record)


def _key(item: pytest.Item) -> Key:
    """Return the primitive of the marker ``verifies``, or else the file's name, and the world of the parameters."""
    marker = item.get_closest_marker("verifies")
    primitive = item.path.stem.removeprefix("test_") if marker is None else ", ".join(marker.args)
    case = case_of(item)
    if case is not None:
        return primitive, case.world
    callspec = getattr(item, "callspec", None)
    return primitive, str(NO_WORLD if callspec is None else callspec.params.get("world", NO_WORLD))


def _executed(found: Any) -> int:
    """Return how many examples ran to the end of the test or failed in it; rejected ones do not count."""
    phases = (value for name, value in found.items() if name.endswith("-phase"))
    return sum(case["status"] in ("valid", "interesting") for phase in phases for case in phase["test-cases"])


def _failure(report: pytest.TestReport) -> str:
    parts = [report.longreprtext]
    parts += [f"----- {title} -----\n{text.rstrip()}" for title, text in report.sections if title != "replay"]
    return "\n".join(parts)


def _reason(report: pytest.TestReport) -> str:
    expected = getattr(report, "wasxfail", None)
    if expected is not None:
        return f"expected to fail: {expected}" if expected else "expected to fail"
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")
