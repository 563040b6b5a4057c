"""The debuggers of a session with simulated ranks: ``--rank-pdb`` and ``--pdb``."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from pdlcheck.compat.pytest.terminal import PdbInvoke, break_at

__all__ = ["debug_simulated", "post_mortem_on_sim"]


def debug_simulated(config: pytest.Config, rank: int) -> None:
    """Let ``breakpoint()`` stop only in the chosen simulated rank; outside of ranks, it works as in pytest."""
    import torch.distributed as dist

    def at_breakpoint(*args: Any, **kwargs: Any) -> None:
        if dist.is_initialized() and dist.get_rank() != rank:
            return
        break_at(sys._getframe().f_back)

    before, sys.breakpointhook = sys.breakpointhook, at_breakpoint
    config.add_cleanup(lambda: setattr(sys, "breakpointhook", before))


def post_mortem_on_sim(node: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport, rank: int) -> None:
    """Open pytest's own debugger at the failure of a simulated rank, if it is the chosen rank."""
    assert call.excinfo is not None
    told = re.match(r"rank (\d+) of ", "\n".join(getattr(call.excinfo.value, "__notes__", [])))
    if told is None or int(told[1]) == rank:
        PdbInvoke().pytest_exception_interact(node, call, report)
