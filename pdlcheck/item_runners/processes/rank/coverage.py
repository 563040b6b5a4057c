"""Coverage of ranks for pytest-cov: each rank measures with the controller's settings and writes a data file.

The files stay in the session's temporary folder until all tests have run, so that an interrupted run leaves none beside
the user's code. Then they are moved to the folder where pytest-cov combines them.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.compat.pytest_cov import controller_of
from pdlcheck.harness.running.folders import basetemp_of, seen_from_here

if TYPE_CHECKING:
    from pdlcheck.worlds import World

__all__ = ["CoverageSettings", "fetch", "hand_over", "save", "settings_of", "start", "switch"]

_IGNORED = "run:disable_warnings"  # an option of coverage
# A rank need not import all sources, so these warnings do not apply.
_NOT_IN_RANKS = ("no-data-collected", "module-not-imported", "module-not-python", "module-not-measured")

_measuring: Any = None
_by_test = False


@dataclass(frozen=True)
class CoverageSettings:
    """The settings of pytest-cov in the controller; ``data_file`` is the path to which each rank adds a suffix."""

    data_file: str
    config_file: str
    source: Sequence[str] | None
    branch: bool | None
    by_test: bool


def settings_of(config: pytest.Config) -> CoverageSettings | None:
    """Return the settings for ranks; None if pytest-cov does not measure."""
    controller = controller_of(config)
    if controller is None:
        return None
    return CoverageSettings(
        str(_folder(config) / ".coverage"),
        controller.cov_config,
        controller.cov_source,
        controller.cov_branch,
        config.getoption("cov_context", None) == "test",
    )


def start(settings: CoverageSettings) -> None:
    """Measure coverage in this rank, from now to the end of the process."""
    global _measuring, _by_test
    import coverage

    from pdlcheck.worlds.processes.rank.exit_callbacks import after_calls

    os.makedirs(os.path.dirname(settings.data_file), exist_ok=True)
    _measuring = coverage.Coverage(
        data_file=settings.data_file,
        data_suffix=True,
        config_file=settings.config_file,
        source=settings.source,
        branch=settings.branch,
    )
    _measuring.set_option(_IGNORED, [*_measuring.get_option(_IGNORED), *_NOT_IN_RANKS])
    _by_test = settings.by_test
    _measuring.start()
    atexit.register(save)
    after_calls.append(save)


def save() -> None:
    """Write, in a rank, the data measured so far, because the process may be killed at the next failure."""
    if _measuring is not None:
        _measuring.save()


def switch(context: str) -> None:
    """Assign, in a rank, the code that runs from now on to this phase of a test, for ``--cov-context=test``."""
    if _by_test:
        _measuring.switch_context(context)


def fetch(config: pytest.Config, world: World, world_size: int) -> None:
    """Copy the data files of ranks on other nodes to this node; the ranks have ended."""
    if controller_of(config) is None:
        return
    folder, seen = _folder(config), seen_from_here(config)
    folder.mkdir(exist_ok=True)
    for files in world.run(_give, str(folder), str(seen), world_size=world_size):
        for name, data in files.items():
            (folder / name).write_bytes(data)


def _give(folder: str, seen: str) -> dict[str, bytes]:
    """Return, in a rank, the data files of its node and delete them there; none if the controller sees them already."""
    global _measuring
    if _measuring is not None:  # the user's code has ended
        _measuring.stop()
        _measuring = None
    if os.environ["LOCAL_RANK"] != "0" or os.path.exists(seen):
        return {}
    files = {path.name: path.read_bytes() for path in Path(folder).glob(".coverage.*")}
    shutil.rmtree(folder, ignore_errors=True)
    return files


def hand_over(config: pytest.Config) -> None:
    """Move the ranks' data files beside the controller's file; the ranks have ended."""
    controller = controller_of(config)
    if controller is None:
        return
    target = Path(controller.topdir, controller.cov.config.data_file)
    for path in sorted(_folder(config).glob(".coverage.*")):
        shutil.move(path, target.with_name(target.name + path.name.removeprefix(".coverage")))


def _folder(config: pytest.Config) -> Path:
    return basetemp_of(config) / "coverage-of-ranks"
