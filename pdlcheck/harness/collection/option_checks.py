"""Checks for invalid options of the command line and ini values. Does not import torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pdlcheck.harness.collection.cases import world_names
from pdlcheck.launch.traces import has_traces
from pdlcheck.worlds.registry import WORLDS, is_simulated

if TYPE_CHECKING:
    from pdlcheck.launch.environment import Launch

__all__ = ["check_options"]


def check_options(config: pytest.Config) -> None:
    """Raise a usage error if an option is invalid."""
    names = world_names(config)
    # Store the default too, because the ranks' own sessions are under no launcher.
    config.option.pdl_world = ",".join(names)
    for name in names or [""]:
        if name not in WORLDS:
            raise pytest.UsageError(f"--world must name some of {', '.join(sorted(WORLDS))}; got {name!r}")
    if getattr(config.option, "update_snapshots", False) and not all(map(is_simulated, names)):
        raise pytest.UsageError(
            "--snapshot-update with a world other than sim: syrupy does not see what ranks in processes compare, "
            "writes none of it, and would delete what it has of them; update with --world sim"
        )
    rank = config.getoption("--pdl-rank-pdb")
    if rank is not None and rank < 0:
        raise pytest.UsageError(f"--rank-pdb takes the number of a rank, from 0 on; got {rank}")
    if rank is not None and (hasattr(config, "workerinput") or config.getoption("numprocesses", None)):
        raise pytest.UsageError("--rank-pdb needs the terminal, which workers of pytest-xdist do not have; use -n 0")
    own = _launch(config)
    if rank is not None and own is not None and rank >= (own.local_world_size or own.world_size):
        raise pytest.UsageError(
            f"--rank-pdb {rank}: the terminal is that of rank 0, on whose node {own.local_world_size} of "
            f"{own.world_size} ranks are; take one of these, or launch on one node"
        )
    if config.getoption("--pdl-schedule") is not None:
        from pdlcheck.harness.item_runner import runner_of

        for name in names:
            runner_of(name).check_options(config)
    folder = config.option.pdl_timeline
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        raise pytest.UsageError(f"--timeline takes a folder for pictures; {folder!r} is a file")
    for text in config.getoption("--pdl-subject"):
        name, _, target = text.partition("=")
        if not (name and target.count(":") == 1):
            raise pytest.UsageError(f"--subject takes NAME=MODULE:FUNCTION; got {text!r}")


def _launch(config: pytest.Config) -> Launch | None:
    asked = (config.option.pdl_launch, config.option.pdl_init_method, config.getini("pdlcheck_launch"))
    if asked == (None, None, "auto") and not has_traces(os.environ):
        return None
    from pdlcheck.harness.collection import launch

    return launch.candidate(config)
