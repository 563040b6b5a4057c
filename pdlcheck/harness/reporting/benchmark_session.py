"""The results of ``rank_benchmark``: rows of pytest-benchmark, a table, and the machine in the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import pytest

from pdlcheck.bench.hardware import describe_machine
from pdlcheck.bench.measurement import Measurement, Subject, combine
from pdlcheck.bench.records import RankRecord
from pdlcheck.harness.collection.cases import case_of, world_of
from pdlcheck.harness.reporting.benchmark_rows import add_row
from pdlcheck.report.measured import measured_table

__all__ = ["NOTE", "add_rows", "note_untimed", "record_notes"]

_WIDE = 400  # characters: the table becomes as wide as its cells, like that of pytest-benchmark
NOTE = "measured"  # the kind of note in the journals of ranks


class _Measured:
    """A plugin of a session in which ranks measured something."""

    NAME = "pdlcheck.harness.reporting.benchmark_session"

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.running: list[Any] = []  # rows of pytest-benchmark of the current test
        self.untimed: set[str] = set()  # tests on sim

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Drop the times of a test that fails, whatever it has measured before."""
        if report.when != "call":
            return
        if report.failed:
            for row in self.running:
                row.fixture.has_error = True  # pytest-benchmark leaves out such rows
            del self.rows[len(self.rows) - len(self.running) :]
        self.running.clear()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, and the number of tests that were not timed."""
        from rich.console import Console

        if self.untimed:
            tests = f"{len(self.untimed)} test{'s' * (len(self.untimed) > 1)}"
            terminalreporter.write_line(
                f"rank benchmarks: {tests} ran once on sim, whose ranks take turns, so nothing was timed; --world gloo "
                "times them"
            )
        if not self.rows:
            return
        text = StringIO()
        Console(file=text, width=_WIDE, highlight=False, no_color=True).print(measured_table(self.rows))
        terminalreporter.write_line("\n".join(line.rstrip() for line in text.getvalue().splitlines()))

    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Add the description of the machine to the JSON."""
        if self.rows:
            machine_info["pdlcheck"] = describe_machine()


def record_notes(item: pytest.Item, noted: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Record the measurements that all ranks noted; ``noted`` is by rank."""
    for notes in zip(*noted, strict=False):  # a failed rank has noted less, and its test fails
        wrong: dict[str, int] = {}
        for note in notes:
            for name, number in note["subject"]["wrong"].items():
                wrong[name] = wrong.get(name, 0) + number
        subject = Subject(**notes[0]["subject"] | {"wrong": wrong})
        found = combine([RankRecord.from_json(note["record"]) for note in notes], subject)
        add_rows(item, notes[0]["group"], found, world_of(item))


def add_rows(item: pytest.Item, group: str | None, found: Sequence[Measurement], world: str | None) -> None:
    """Record the measurements of one test; a row of a function of ``against`` has that function's name in brackets."""
    session = _of_session(item.config)
    for place, one in enumerate(found):
        also = f" [{one.name}]" if place else ""
        world_size = one.facts["world_size"]
        name, fullname = (f"{_without_world(text, item, world_size)}{also}" for text in (item.name, item.nodeid))
        one.facts["world"] = world
        row = add_row(item, (name, fullname), group, one.facts, one.iterations, one.seconds)
        if row is not None:
            session.running.append(row)
            session.rows.append((name, one.facts))


def note_untimed(item: pytest.Item) -> None:
    """Record a test whose ranks are simulated; it is not timed, because its times would mean nothing."""
    _of_session(item.config).untimed.add(item.nodeid)


def _of_session(config: pytest.Config) -> _Measured:
    plugins = config.pluginmanager
    if not plugins.has_plugin(_Measured.NAME):
        plugins.register(_Measured(), _Measured.NAME)
    found = plugins.get_plugin(_Measured.NAME)
    assert isinstance(found, _Measured)
    return found


def _without_world(text: str, item: pytest.Item, world_size: int) -> str:
    """Replace the world in a test's name by the number of ranks, so that rows pair up across worlds and devices."""
    case = case_of(item)
    named = str(case) if case is not None else str(world_of(item))
    before, bracket, after = text.rpartition("[")
    return f"{before}{bracket}{after.replace(named, f'{world_size}ranks', 1)}" if bracket else text
