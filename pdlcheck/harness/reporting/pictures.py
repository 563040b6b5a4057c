"""``--timeline DIR``: a picture of what the simulated ranks of each test did, also of a test that failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdlcheck.harness.collection.cases import world_of
from pdlcheck.harness.running.worlds import open_world

__all__ = ["draw"]


def draw(item: pytest.Item, report: pytest.TestReport) -> None:
    """Write the last run of the test's simulated world as JSON and SVG; a test that failed names the picture."""
    if report.when != "call" or world_of(item) != "sim":
        return
    try:
        timeline = open_world(item.config, "sim").timeline
    except RuntimeError:  # it has run nothing
        return
    folder = Path(item.config.getoption("--pdl-timeline"))
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.]+", "-", item.nodeid).strip("-")
    for suffix in (".json", ".svg"):
        path = timeline.save(folder / f"{name}{suffix}")
    if report.failed:
        report.sections.append(("timeline", str(path)))
