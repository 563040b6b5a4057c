"""Support for torch's ``CommDebugMode``, which counts the collectives that pass torch's dispatcher.

A watched group counts when an operation is posted. The call on the real group may come later and in another thread.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pdlcheck.worlds.observe.operation import Operation

__all__ = ["count", "uncounted"]

_MODULE = "torch.distributed.tensor.debug._comm_mode"  # the module of the mode, once a program has imported it
_OPS = {
    "_allgather_base": "_allgather_base_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
}  # the dispatcher ops of these group methods; the op of another method has its name and a final "_"


def count(operation: Operation) -> None:
    """Make the modes of this thread count a collective as if it passed through the dispatcher."""
    for mode in _modes():
        mode.__torch_dispatch__(_Op(_OPS.get(operation.method, f"{operation.method}_")), ())


def uncounted() -> AbstractContextManager[Any]:
    """Return a context in which no mode counts."""
    return torch._C._DisableTorchDispatch() if _modes() else nullcontext()


def _modes() -> list[Any]:
    if not torch._C._len_torch_dispatch_stack() or (module := sys.modules.get(_MODULE)) is None:
        return []
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, module.CommDebugMode)]


class _Op:
    """A stand-in for an op of the dispatcher, with the attributes that the mode reads; it does nothing when called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._overloadpacket = getattr(torch.ops.c10d, name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"c10d.{self._name}.default"
