"""pytest-cov counts what runs in ranks: each of them measures with the same settings and leaves a data file.

The files are kept in the session's temporary folder until the tests have run, so that an interrupted run leaves none
beside the user's code; then they are put where pytest-cov combines them.
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

from pdlcheck.harness.running.folders import basetemp_of, seen_from_here

if TYPE_CHECKING:
    from pdlcheck.worlds import World

__all__ = ["CoverageSettings", "fetch", "hand_over", "save", "settings_of", "start", "switch"]

_measuring: Any = None
_by_test = False


@dataclass(frozen=True)
class CoverageSettings:
    """How pytest-cov measures in the controller. ``data_file`` is where the ranks write, with a suffix each."""

    data_file: str
    config_file: str
    source: Sequence[str] | None
    branch: bool | None
    by_test: bool


def settings_of(config: pytest.Config) -> CoverageSettings | None:
    """The settings for ranks; None where pytest-cov does not measure."""
    controller = _controller(config)
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
    """In a rank: measure from now on, to the end of the process."""
    global _measuring, _by_test
    import coverage

    from pdlcheck.worlds.processes.rank.at_end import after_calls

    os.makedirs(os.path.dirname(settings.data_file), exist_ok=True)
    _measuring = coverage.Coverage(
        data_file=settings.data_file,
        data_suffix=True,
        config_file=settings.config_file,
        source=settings.source,
        branch=settings.branch,
    )
    # a rank need not import everything; pytest-cov silences its workers in the same way
    _measuring._warn_no_data = _measuring._warn_unimported_source = _measuring._warn_preimported_source = False
    _by_test = settings.by_test
    _measuring.start()
    atexit.register(save)
    after_calls.append(save)


def save() -> None:
    """In a rank: write what was measured so far, as the process may be killed at the next failure."""
    if _measuring is not None:
        _measuring.save()


def switch(context: str) -> None:
    """In a rank: what runs from now on belongs to this phase of a test, for ``--cov-context=test``."""
    if _by_test:
        _measuring.switch_context(context)


def fetch(config: pytest.Config, world: World, world_size: int) -> None:
    """Bring the files of ranks on other nodes, which have ended, to this one."""
    if _controller(config) is None:
        return
    folder, seen = _folder(config), seen_from_here(config)
    folder.mkdir(exist_ok=True)
    for files in world.run(_give, str(folder), str(seen), world_size=world_size):
        for name, data in files.items():
            (folder / name).write_bytes(data)


def _give(folder: str, seen: str) -> dict[str, bytes]:
    """In a rank: the files of its node, which are no longer there; none where the controller has them already."""
    global _measuring
    if _measuring is not None:  # from now on there is nothing of the user's to measure
        _measuring.stop()
        _measuring = None
    if os.environ["LOCAL_RANK"] != "0" or os.path.exists(seen):
        return {}
    files = {path.name: path.read_bytes() for path in Path(folder).glob(".coverage.*")}
    shutil.rmtree(folder, ignore_errors=True)
    return files


def hand_over(config: pytest.Config) -> None:
    """Put the ranks' files beside the controller's; the ranks have ended."""
    controller = _controller(config)
    if controller is None:
        return
    target = Path(controller.topdir, controller.cov.config.data_file)
    for path in sorted(_folder(config).glob(".coverage.*")):
        shutil.move(path, target.with_name(target.name + path.name.removeprefix(".coverage")))


def _controller(config: pytest.Config) -> Any:
    plugin = config.pluginmanager.getplugin("_cov")
    return None if plugin is None or getattr(plugin, "_disabled", False) else plugin.cov_controller


def _folder(config: pytest.Config) -> Path:
    return basetemp_of(config) / "coverage-of-ranks"
