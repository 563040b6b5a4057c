"""The pictures of ``--timeline DIR``: the operations of the simulated ranks of each test, including failed tests."""

from __future__ import annotations

import re
import warnings
from hashlib import blake2b
from pathlib import Path

import pytest

from pdlcheck.harness.collection.cases import world_of
from pdlcheck.harness.reporting.summary_warning import record_warning
from pdlcheck.harness.running.worlds import open_world
from pdlcheck.worlds.registry import is_simulated

__all__ = ["draw"]

_LONGEST = 200  # bytes, of the 255 that a file name may have


def draw(item: pytest.Item, report: pytest.TestReport) -> None:
    """Write the last run of the test's simulated world as JSON and SVG; a failed test's report names the picture."""
    if report.when != "call" or not is_simulated(world_of(item)):
        return
    try:
        timeline = open_world(item.config, world_of(item)).timeline
    except RuntimeError:  # the world has run nothing
        return
    folder = Path(item.config.getoption("--pdl-timeline"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in (".json", ".svg"):
            path = timeline.save(folder / f"{_name(item.nodeid)}{suffix}")
    except OSError as error:
        _warn(item, f"--timeline: no picture of {item.nodeid} in {folder}: {error.strerror or error}")
        return
    if report.failed:
        report.sections.append(("timeline", str(path)))


def _name(nodeid: str) -> str:
    """Return a file name for a test; it has a digest if another test could have the same name, or if it is too long."""
    name = re.sub(r"[^\w.]+", "-", nodeid).strip("-")
    short = name.encode()[:_LONGEST].decode(errors="ignore")
    if short == name and not re.search(r"[^\w.-]", nodeid.partition("[")[2].rstrip("]")):
        return name
    return f"{short}-{blake2b(nodeid.encode(), digest_size=4).hexdigest()}"


def _warn(item: pytest.Item, words: str) -> None:
    path, line, _ = item.location
    kind = pytest.PytestWarning
    record_warning(item, warnings.WarningMessage(kind(words), kind, path, line or 0))
