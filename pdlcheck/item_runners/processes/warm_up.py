"""The preparation of process worlds while pytest collects. Does not import torch."""

from __future__ import annotations

import pytest

from pdlcheck.harness.collection import launch
from pdlcheck.harness.collection.cases import world_names
from pdlcheck.item_runners.launched import session as launched
from pdlcheck.worlds.registry import is_simulated

__all__ = ["warm_up"]


def warm_up(config: pytest.Config) -> None:
    """Let a fork server import what ranks will need, and let launched processes join, while tests are collected."""
    if launch.candidate(config) is not None and launch.launch(config) is None:
        return  # whether this process runs tests on ranks is decided later
    if not all(map(is_simulated, world_names(config))) and not config.getoption("collectonly"):
        from pdlcheck.worlds.processes.controller import forkserver

        own = launch.launch(config)
        rank = None if own is None else own.rank
        forkserver.start(preload=launched.PRELOAD, seed=config.getoption("--pdl-seed"), rank=rank)
    launched.placement(config)
