"""Support for torch's ``CommDebugMode``, which counts the collectives that pass torch's dispatcher.

A watched group counts when an operation is posted. The call on the real group may come later and in another thread.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pdlcheck.compat.torch.dispatch import CommModeOp
from pdlcheck.compat.torch.modes import DisableTorchDispatch, dispatch_modes, number_of_dispatch_modes
from pdlcheck.operations.operation import Operation

__all__ = ["count", "uncounted"]

_MODULE = "torch.distributed.tensor.debug"  # the module of the mode, once a program has imported it


def count(operation: Operation) -> None:
    """Make the modes of this thread count a collective as if it passed through the dispatcher."""
    for mode in _modes():
        mode.__torch_dispatch__(CommModeOp(operation.method.dispatcher_op), ())


def uncounted() -> AbstractContextManager[Any]:
    """Return a context in which no mode counts."""
    return DisableTorchDispatch() if _modes() else nullcontext()


def _modes() -> list[Any]:
    if not number_of_dispatch_modes() or (module := sys.modules.get(_MODULE)) is None:
        return []
    return [mode for mode in dispatch_modes() if isinstance(mode, module.CommDebugMode)]
