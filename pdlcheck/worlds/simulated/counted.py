"""Collectives that torch's ``CommDebugMode`` counts, which sees those of a process in torch's dispatcher."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pdlcheck.worlds.watch import Operation

__all__ = ["count"]

_MODULE = "torch.distributed.tensor.debug._comm_mode"  # where the mode is, once a program has imported it
_OPS = {
    "_allgather_base": "_allgather_base_",
    "_reduce_scatter_base": "_reduce_scatter_base_",
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "all_to_all_single": "alltoall_base_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
}  # methods of a group by the ops that C++ makes of them; the others are called as these are


def count(operation: Operation) -> None:
    """Have the modes of the running rank count a collective, as one that passes through the dispatcher."""
    if not torch._C._len_torch_dispatch_stack() or operation.signature.is_p2p:
        return
    if (module := sys.modules.get(_MODULE)) is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Op(_OPS.get(operation.method, f"{operation.method}_")), ())


class _Op:
    """What the mode asks about an op of the dispatcher; the group itself carries it out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._overloadpacket = getattr(torch.ops.c10d, name, None)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"c10d.{self._name}.default"
