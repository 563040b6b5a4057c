"""The function to which Python gives an exception that ends a program."""

from __future__ import annotations

import sys
from typing import Any

from pdlcheck.worlds.simulated.process_state.protocol import RunState

__all__ = ["ExceptionHook"]


class ExceptionHook(RunState):
    """``sys.excepthook``, which ranks share; the controller has its own again after a run.

    ``init_process_group`` puts a hook of torch in front of it, once for each rank.
    """

    at_switches = False

    def capture(self) -> Any:
        """Return the hook."""
        return sys.excepthook

    def apply(self, state: Any) -> None:
        """Set the hook."""
        sys.excepthook = state
