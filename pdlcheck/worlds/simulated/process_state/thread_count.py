"""The number of threads with which torch computes."""

from __future__ import annotations

from typing import Any

import torch

from pdlcheck.worlds.simulated.process_state.protocol import Rank, RunState

__all__ = ["ThreadCount"]


class ThreadCount(RunState):
    """The number of computing threads, which torch keeps by thread: 1 on a rank, until its code sets another one."""

    at_switches = False

    def capture(self) -> int:
        """Return the number for this thread."""
        return torch.get_num_threads()

    def apply(self, state: int) -> None:
        """Set the number for this thread, and for threads that start later."""
        torch.set_num_threads(state)

    def begin(self, rank: Rank, kept: Any) -> Any:
        """Let the rank compute with one thread."""
        torch.set_num_threads(1)
        return kept
