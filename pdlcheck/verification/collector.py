"""The pytest plugin object of one run: it keeps the items that are meant, counts examples, makes records."""

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
_listener: Any = statistics.collector  # Hypothesis types it as a variable that is always None


@dataclass
class _Running:
    """What is known of a test before it has ended."""

    key: Key
    examples: int = 0
    seconds: float = 0.0
    outcome: Literal["holds", "fails", "skipped"] = "holds"
    details: list[str] = field(default_factory=list)


class Collector:
    """Tells ``display`` what happens, and keeps a record of every test in ``records``.

    Args:
        display: sees every test start and end.
        primitives: only their tests run; empty means all. One that no test is about is put into ``unknown``,
            and then nothing runs.
        replay: the command for a node id in a world.
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
        """Let pytest's own reporter speak into the void: others ask it for its settings."""
        config.pluginmanager.unregister(name="terminalreporter")
        self._void = open(os.devnull, "w")  # noqa: SIM115  # closed in pytest_unconfigure
        config.pluginmanager.register(pytest.TerminalReporter(config, self._void), "terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._void.close()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.known = {_key(item)[0] for item in items}
        self.unknown = next((name for name in self._primitives if name not in self.known), "")
        if self.unknown:
            items.clear()
        elif self._primitives:
            dropped = [item for item in items if _key(item)[0] not in self._primitives]
            items[:] = [item for item in items if _key(item)[0] in self._primitives]
            config.hook.pytest_deselected(items=dropped)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self.unknown:
            return
        self._running = {item.nodeid: _Running(_key(item)) for item in session.items}
        self._display.begin(Counter(running.key for running in self._running.values()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.records.append(
                PropertyRecord(report.nodeid, report.nodeid, NO_WORLD, "fails", 0, 0.0, report.longreprtext)
            )

    def pytest_internalerror(self, excrepr: object) -> None:
        self.internal_error = f"pytest stopped with an error of its own:\n{excrepr}"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._display.running(self._running[nodeid].key)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """Count examples where Hypothesis draws them: in this process, whichever world runs them."""
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
    """The primitive of the marker ``verifies``, or the name of the file; the world among the parameters."""
    marker = item.get_closest_marker("verifies")
    primitive = item.path.stem.removeprefix("test_") if marker is None else ", ".join(marker.args)
    case = case_of(item)
    if case is not None:
        return primitive, case.world
    callspec = getattr(item, "callspec", None)
    return primitive, str(NO_WORLD if callspec is None else callspec.params.get("world", NO_WORLD))


def _executed(found: Any) -> int:
    """Examples that ran to the end of the test or failed in it; not those thrown away while drawing."""
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
