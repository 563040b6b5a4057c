"""The settings that torch keeps by thread. Ranks start with the controller's settings.

Processes that import the controller's files would start with them too. These are: grad mode, the default device, and
the torch-function modes that are entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from pdlcheck.compat.torch.modes import function_modes
from pdlcheck.compat.torch.thread_settings import device_mode, set_device_mode, set_function_modes
from pdlcheck.worlds.simulated.process_state.protocol import Kept, ProcessState, Rank

__all__ = ["Settings", "ThreadSettings"]


class Settings(NamedTuple):
    """The settings of one thread."""

    computes_gradients: bool
    modes: tuple[Any, ...]
    device: Any  # the mode that `set_default_device` has entered; it is one of the modes

    def same_as(self, other: Settings) -> bool:
        """Return whether no setting differs. Equal modes are the same objects."""
        return self.computes_gradients is other.computes_gradients and _same(self.modes, other.modes)


class ThreadSettings(ProcessState):
    """The settings of a rank's thread. A rank keeps its own from run to run, until the controller changes one."""

    at_switches = False
    start: Settings

    def capture(self) -> Settings:
        """Return the settings of this thread."""
        return Settings(torch.is_grad_enabled(), tuple(function_modes()), device_mode())

    def apply(self, state: Settings) -> None:
        """Apply the settings to this thread."""
        if torch.is_grad_enabled() is not state.computes_gradients:
            torch.set_grad_enabled(state.computes_gradients)
        set_function_modes(state.modes)
        if device_mode() is not state.device:
            set_device_mode(state.device)

    def baseline(self) -> Callable[[], object] | None:
        """Record the controller's settings. Ranks have threads of their own, so there is nothing to restore."""
        self.start = self.capture()
        return None

    def begin(self, rank: Rank, kept: Kept | None) -> Kept | None:
        """Apply the controller's settings, unless the rank has them from an earlier run."""
        if kept is None or not self.start.same_as(kept.start):
            self.apply(self.start)
        return kept

    def give(self, rank: Rank, kept: Kept) -> Kept:
        """Apply the settings that the rank has changed to the controller's thread."""
        if not kept.state.same_as(kept.start):
            self.apply(kept.state)
        return kept


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))
