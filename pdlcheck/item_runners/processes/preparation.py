"""The preparation of rank processes for a pytest session, whichever way tests use them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from pdlcheck.item_runners.processes.rank import coverage as rank_coverage
from pdlcheck.item_runners.processes.rank import debugger as rank_debugger

__all__ = ["options_of_processes"]


@dataclass(frozen=True)
class _Preparation:
    coverage: rank_coverage.CoverageSettings | None
    terminal: rank_debugger.Terminal | None


def options_of_processes(config: pytest.Config) -> dict[str, Any]:
    """Return the arguments for a world whose ranks are processes."""
    rank = config.getoption("--pdl-rank-pdb")
    terminal = None
    if rank is not None:
        from pdlcheck.item_runners.processes.lent_terminal import lend

        terminal = lend(config, rank)
    preparation = _Preparation(rank_coverage.settings_of(config), terminal)
    return {"prepare": partial(_prepare, preparation), "debugged": rank}


def _prepare(preparation: _Preparation) -> None:
    rank_debugger.serve(preparation.terminal)
    if preparation.coverage is not None:
        rank_coverage.start(preparation.coverage)
