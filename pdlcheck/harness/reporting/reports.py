"""The report of a failed item: the merged report of its ranks, hints, and the replay command."""

from __future__ import annotations

import shlex
from traceback import walk_tb
from typing import Any

import pytest

from pdlcheck.errors import PdlcheckError
from pdlcheck.harness.collection import cases, cuda_as_cpu
from pdlcheck.harness.collection.drawn_at_import import differs_between_ranks
from pdlcheck.harness.collection.schedules import FOUND
from pdlcheck.harness.collection.short_names import name_of
from pdlcheck.harness.reporting.rank_reports import add_notes, rank_reports, show_text
from pdlcheck.worlds.exceptions import text_of
from pdlcheck.worlds.registry import is_simulated

__all__ = ["add_sections", "use_report_of_ranks"]

_NO_GROUP = "Default process group has not been initialized"  # part of torch's message
_ON_RANKS = (
    "the test ran in one process, which has no group; to run its body on ranks mark it, or its class, "
    "@pytest.mark.world_size({})"
)


def use_report_of_ranks(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Give the report of an item the traceback of the rank that failed first.

    The failure is expected if it was expected in the rank: only the rank has marks that were added late, and the
    exception's class.
    """
    if call.excinfo is None:
        return
    error = call.excinfo.value
    merged = rank_reports(item).merged(error)
    if merged is not None and hasattr(merged, "wasxfail"):
        report.outcome, report.wasxfail = "skipped", merged.wasxfail
    if not report.failed:
        return
    if merged is not None:
        report.longrepr = merged.longrepr
    elif isinstance(error, PdlcheckError) and not _passes_through(error, str(item.path)):
        # The frames are the controller's own, so the message without them is more useful.
        text = "\n".join(f"E   {line}" for line in f"{type(error).__name__}: {error}".splitlines())
        report.longrepr = shown = show_text(item, text, call.excinfo.exconly(tryshort=True))
        add_notes(shown, getattr(error, "__notes__", ()))


def _size_meant(item: pytest.Item) -> int:
    """Return the world size that a test of another harness intends; 2 if it names none.

    That is the attribute ``world_size`` of its class, or ``min_size`` of its marker ``mpi``.
    """
    marker = item.get_closest_marker("mpi")
    of_class = getattr(getattr(item, "cls", None), "world_size", None)
    meant = of_class if of_class is not None or marker is None else marker.kwargs.get("min_size")
    return meant if isinstance(meant, int) and meant > 0 else 2


def add_sections(item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    """Add the command that runs this test again, and hints, to the report of a failure."""
    if call.excinfo is None:
        return
    error = call.excinfo.value
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
