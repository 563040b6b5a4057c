"""The report of a failure: the rank's own report, hints, and the replay command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any

import pytest

from pdlcheck.compat.pytest.reports import (
    ExceptionRepr,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTracebackNative,
    TerminalWriter,
)
from pdlcheck.errors import PdlcheckError
from pdlcheck.harness.collection import cases, cuda_as_cpu
from pdlcheck.harness.collection.drawn_at_import import differs_between_ranks
from pdlcheck.harness.collection.schedules import FOUND
from pdlcheck.harness.collection.short_names import name_of
from pdlcheck.worlds.exceptions import text_of
from pdlcheck.worlds.registry import is_simulated

__all__ = ["RANK_CRASH", "RANK_MESSAGE", "RANK_REPORT", "RANK_XFAIL", "take_expected", "tell"]

RANK_CRASH = "_pdlcheck_crash"  # attribute of an exception: ``path:line`` that raised it on the rank
RANK_MESSAGE = "_pdlcheck_message"  # attribute of an exception: the line for pytest's summary, from the rank
RANK_REPORT = "_pdlcheck_report"  # attribute of an exception: the report that the rank rendered
RANK_XFAIL = "_pdlcheck_xfail"  # attribute of an exception: the reason of its xfail mark on the rank

_NO_GROUP = "Default process group has not been initialized"  # part of torch's message
_ON_RANKS = (
    "the test ran in one process, which has no group; to run its body on ranks mark it, or its class, "
    "@pytest.mark.world_size({})"
)


def take_expected(error: BaseException, report: pytest.TestReport) -> None:
    """Mark a failure as expected if the rank's pytest expected it.

    Only the rank has marks that were added late, and the exception's class.
    """
    reason = getattr(error, RANK_XFAIL, None)
    if reason is not None:
        report.outcome = "skipped"
        report.wasxfail = reason


def _size_meant(item: pytest.Item) -> int:
    """Return the world size that a test of another harness intends; 2 if it names none.

    That is the attribute ``world_size`` of its class, or ``min_size`` of its marker ``mpi``.
    """
    marker = item.get_closest_marker("mpi")
    of_class = getattr(getattr(item, "cls", None), "world_size", None)
    meant = of_class if of_class is not None or marker is None else marker.kwargs.get("min_size")
    return meant if isinstance(meant, int) and meant > 0 else 2


def tell(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Add the failing rank's own report, and the command that runs this test again, to the report."""
    if call.excinfo is None:
        return
    error = call.excinfo.value
    rendered = getattr(error, RANK_REPORT, None)
    if rendered is None and isinstance(error, PdlcheckError) and not _passes_through(error, str(item.path)):
        # The frames are the controller's own, so the message without them is more useful.
        rendered = "\n".join(f"E   {line}" for line in f"{type(error).__name__}: {error}".splitlines())
    if rendered is not None:
        report.longrepr = _RankReport(item, call.excinfo, rendered)
    world = cases.world_of(item)
    if world is None and _NO_GROUP in text_of(error):
        report.sections.append(("no ranks", _ON_RANKS.format(_size_meant(item))))
    if world is not None:
        command = ["pytest", item.nodeid, _name(item, "--pdl-world"), world]
        command.append(f"--pdl-seed={item.config.getoption('--pdl-seed')}")
        if device := item.config.getoption("--pdl-rank-device"):
            command += [_name(item, "--pdl-rank-device"), device]
        if item.config.getoption(cuda_as_cpu.OPTION):
            command.append(_name(item, cuda_as_cpu.OPTION))
        if is_simulated(world) and (semantics := item.config.getoption("--pdl-semantics")) != "rendezvous":
            command += [_name(item, "--pdl-semantics"), semantics]
        schedule = item.stash.get(FOUND, item.config.getoption("--pdl-schedule"))
        if schedule is not None and is_simulated(world):
            command.append(f"{_name(item, '--pdl-schedule')}={schedule}")
        for subject in item.config.getoption("--pdl-subject"):
            command += [_name(item, "--pdl-subject"), subject]
        if not is_simulated(world) and (
            words := differs_between_ranks(str(item.path), item.config.getoption("--pdl-seed"))
        ):
            report.sections.append(("drawn at import", words))
        report.sections.append(("replay", shlex.join(command)))


def _name(item: pytest.Item, option: str) -> str:
    return name_of(item.config, option)


def _passes_through(error: BaseException, path: str) -> bool:
    return any(frame.f_code.co_filename == path for frame, _ in walk_tb(error.__traceback__))


class _RankReport(ReprExceptionInfo):
    """A failure as its rank rendered it, with notes about the other ranks; pytest-xdist can send it."""

    def __init__(self, item: pytest.Item, raised: pytest.ExceptionInfo[BaseException], rendered: str) -> None:
        error = raised.value
        self._text = "\n".join([rendered, "", *_not_in(rendered, getattr(error, "__notes__", []))])
        message = getattr(error, RANK_MESSAGE, None) or raised.exconly(tryshort=True)
        super().__init__(ReprTracebackNative([f"{self._text}\n"]), ReprFileLocation(*_crash_of(error, item), message))

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text in pytest's colours."""
        for line in self._text.splitlines():
            tw.line(line, red=line.startswith("E  "), bold=line.startswith("E  "))
        ExceptionRepr.toterminal(self, tw)


def _not_in(rendered: str, notes: Sequence[str]) -> list[str]:
    """Return the notes that the rank's report does not show: those added after it was rendered."""
    shown = {line.removeprefix("E").strip() for line in rendered.splitlines()}
    return [note for note in notes if not shown.issuperset(line.strip() for line in note.splitlines())]


def _crash_of(error: BaseException, item: pytest.Item) -> tuple[str, int]:
    path, _, line = getattr(error, RANK_CRASH, "").rpartition(":")
    return (path, int(line)) if path else (item.location[0], (item.location[1] or 0) + 1)
