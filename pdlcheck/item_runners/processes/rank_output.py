"""The output and notes of ranks in one phase, reported as sections, warnings, subtests and properties of the item."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TextIO

import pytest

from pdlcheck.compat.pytest.reports import xml_key
from pdlcheck.harness.reporting.common_notes import agreed, words_of
from pdlcheck.harness.reporting.properties import record
from pdlcheck.harness.reporting.rank_reports import rank_reports
from pdlcheck.harness.reporting.rank_subtests import id_of, report
from pdlcheck.harness.reporting.summary_warning import record_warning
from pdlcheck.item_runners.processes import relayed_logs
from pdlcheck.item_runners.processes.hook_verdicts import remember
from pdlcheck.worlds.journal import notes
from pdlcheck.worlds.processes.controller.rank_handle import Written

__all__ = ["RankOutput"]


class RankOutput:
    """The output and notes of the ranks of one item, phase by phase."""

    def __init__(self, item: pytest.Item, world_size: int) -> None:
        capture = item.config.getoption("capture", "fd")
        self._shows_output = capture in ("no", "tee-sys")
        self._shows_log = relayed_logs.is_live(item.config)
        self.live = self._shows_output or self._shows_log
        self._in_sections = capture != "no"
        self._labelled = bool(item.config.getoption("xmlpath", None)) and item.config.getini("junit_logging") != "no"
        self._item = item
        self._ranks = range(world_size)
        self._forget()

    def read(self, written: Written) -> None:
        """Store the output of a rank; show it at once if pytest captures nothing."""
        if self._shows_output:
            self._show((written.rank, "out"), written.out)
            self._show((written.rank, "err"), written.err)
        if self._in_sections:
            self._text[written.rank, "stdout"] += written.out
            self._text[written.rank, "stderr"] += written.err
        for kind, value in notes(written.journal):
            if kind == "log":
                self._text[written.rank, "log"] += f"{value}\n"
            elif kind == "record":
                self._records.append((written.rank, value))
                if self._shows_log:
                    relayed_logs.show(self._item.config, written.rank, value)
            else:
                self._notes[kind][written.rank].append(value)

    def tell(self, when: str) -> None:
        """Report what was read during the phase that has ended."""
        for rest in list(self._partial):
            self._show(rest, "", end=True)
        for rank in self._ranks:
            for key in ("stdout", "stderr", "log"):
                text = self._text[rank, key].rstrip("\n") if key == "log" else self._text[rank, key]
                if text and self._labelled:  # in JUnit XML, sections have no titles
                    text = f"[rank {rank}]\n{text}\n"
                self._item.add_report_section(f"{when} [rank {rank}]", key, text)
        relayed_logs.write(self._item.config, self._records)
        noted = self._notes
        self._forget()
        for warning in _once(noted["warning"]):
            _warn(self._item, warning)
        for which, line in self._agreed(noted["fixture"]):
            self._show_fixture(f"{line}{which}")
        record(self._item, self._by_rank(noted["property"]))
        if noted["benchmark"]:
            from pdlcheck.harness.reporting.benchmark_rows import tell_benchmarks

            tell_benchmarks(self._item, self._by_rank(noted["benchmark"]))
        if noted["measured"]:
            from pdlcheck.harness.reporting.benchmark_session import record_notes

            record_notes(self._item, self._by_rank(noted["measured"]))
        for which, (phase, title, text) in self._agreed(noted["section"]):
            self._item.add_report_section(f"{phase}{which}", title, text)
        for text in rank_reports(self._item).receive(when, noted["failure"]).values():
            remember(self._item, when, text)
        self._write_xml(noted)
        report(self._item, len(self._ranks), noted["subtest"])
        if said := noted["example"]:
            from pdlcheck.harness.reporting.hypothesis_notes import tell

            tell(self._by_rank(said))

    def _forget(self) -> None:
        self._text: defaultdict[tuple[int, str], str] = defaultdict(str)
        self._partial: dict[tuple[int, str], str] = {}
        self._records: list[tuple[int, Mapping[str, Any]]] = []
        self._notes: defaultdict[str, defaultdict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def _show(self, source: tuple[int, str], text: str, *, end: bool = False) -> None:
        rank, name = source
        *lines, rest = (self._partial.pop(source, "") + text).split("\n")
        if end and rest:
            lines, rest = [*lines, rest], ""
        if rest:
            self._partial[source] = rest
        if lines:
            stream = _stream(name, tee=self._in_sections)
            stream.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            stream.flush()

    def _show_fixture(self, line: str) -> None:
        capture = self._item.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture is not None else nullcontext():
            writer = self._item.config.get_terminal_writer()
            writer.write(f"\n{line}")
            writer.flush()

    def _by_rank(self, noted: Mapping[int, list[Any]]) -> list[list[Any]]:
        return [noted.get(rank, []) for rank in self._ranks]

    def _agreed(self, noted: Mapping[int, list[Any]]) -> Iterator[tuple[str, Any]]:
        return agreed(self._by_rank(noted))

    def _write_xml(self, noted: Mapping[str, Mapping[int, list[Any]]]) -> None:
        xml = self._item.config.stash.get(xml_key, None)
        if xml is None:
            return
        for which, (name, value) in self._agreed(noted["suite property"]):
            if (f"{name}{which}", value) not in xml.global_properties:  # not if ranks of another test have recorded it
                xml.add_global_property(f"{name}{which}", value)
        last = {rank: list(dict(own).items()) for rank, own in noted["attribute"].items()}
        attributes: defaultdict[str, list[str]] = defaultdict(list)
        for which, (name, value) in self._agreed(last):
            attributes[name].append(f"{value}{which}")
        for name, values in attributes.items():
            xml.node_reporter(id_of(self._item)).add_attribute(name, ", ".join(values))


def _once(warned: Mapping[int, list[Any]]) -> list[Any]:
    """Return each warning once, whichever ranks raised it."""
    return list({words_of(warning): warning for rank in sorted(warned) for warning in warned[rank]}.values())


def _warn(item: pytest.Item, noted: Mapping[str, Any]) -> None:
    category: Any = Warning
    try:
        category = importlib.import_module(noted["module"])
        for name in noted["category"].split("."):
            category = getattr(category, name)
        message = category(noted["text"])
    except Exception:  # this process cannot create the class, so only its text remains
        category, message = UserWarning, UserWarning(f"{noted['category']}: {noted['text']}")
    record_warning(item, warnings.WarningMessage(message, category, noted["filename"], noted["lineno"]))


def _stream(name: str, *, tee: bool) -> TextIO:
    streams = {"out": (sys.stdout, sys.__stdout__), "err": (sys.stderr, sys.__stderr__)}
    now, process = streams[name]
    return process if tee and process is not None else now
