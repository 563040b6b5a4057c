"""Flags that torch keeps for the whole process in C++, and that its context managers set: each rank has its own.

They control attention kernels (``sdpa_kernel``), determinism, anomaly detection, oneDNN, and the precision of products
in float32. The start method of multiprocessing, which a program sets once, is one of them too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any

import torch

from pdlcheck.compat.python.multiprocessing import set_start_context, start_context
from pdlcheck.compat.torch.flags import (
    FLAGS,
    deterministic_algorithms,
    set_deterministic_algorithms,
    warns_only_of_nondeterminism,
)
from pdlcheck.worlds.simulated.process_state.protocol import ProcessState

__all__ = ["Flags"]

_getters: list[Callable[[], Any]] = [
    *(get for get, _ in FLAGS),
    *(deterministic_algorithms, warns_only_of_nondeterminism),
    *(torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled),
    start_context,
]


class Flags(ProcessState):
    """All flags, always in the same order. A rank keeps its own from run to run, until the controller changes one."""

    _present: tuple[Any, ...] = ()  # the flags in force: ranks change them only between ``apply`` and ``capture``

    def capture(self) -> tuple[Any, ...]:
        """Return the flags."""
        self._present = present = tuple(map(call, _getters))
        return present

    def apply(self, state: tuple[Any, ...]) -> None:
        """Set the flags that differ."""
        now = self._present
        if now == state:
            return
        self._present = state
        for (_, put), value, own in zip(FLAGS, state, now, strict=False):
            if value != own:
                put(value)
        *_, deterministic, warn_only, anomaly, check_nan, context = state
        set_start_context(context)
        if now[-5:-3] != state[-5:-3]:
            set_deterministic_algorithms(deterministic, warn_only=warn_only)
        if now[-3:-1] != state[-3:-1]:
            torch.set_anomaly_enabled(anomaly, check_nan)

    def baseline(self) -> Callable[[], object] | None:
        """Record the controller's flags, and return the function that restores them."""
        self.start = self.capture()
        return partial(self._restore, self.start)

    def _restore(self, start: tuple[Any, ...]) -> None:
        self.capture()  # after an interrupt, a rank may have changed them since
        self.apply(start)
