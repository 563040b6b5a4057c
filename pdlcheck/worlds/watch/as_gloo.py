"""Calls that gloo refuses on the rank that makes them, and that other worlds could carry out.

A test that passes with them would not on processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdlcheck.worlds.watch.operation import Operation

__all__ = ["refuse_outputs_with_grad", "refuse_strides"]

_is_grad_enabled = torch.is_grad_enabled
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_SPLITS = ("all_to_all_single", "alltoall_base")
_THROUGH_VIEWS = (  # gloo fills one flat output through views of it, which autograd lets nobody write to
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
)
_BY_COPIES = {  # gloo copies to the outputs where autograd sees it
    *_THROUGH_VIEWS,
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "gather",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
}


def refuse_strides(operation: Operation) -> None:
    """Check that what gloo takes in one piece lies in one piece.

    Raises:
        RuntimeError: a message does not.
        ValueError: the input of ``all_to_all_single`` does not.
    """
    if operation.signature.is_p2p:
        tensor = operation.args[0][0]
        if not tensor.is_contiguous():
            op = operation.signature.op
            cure = "call .contiguous() first" if op == "send" else "receive a contiguous one, and copy it"
            raise RuntimeError(f"{op}: input tensor has to be contiguous, got {_form(tensor)}; {cure}")
    elif operation.method in _SPLITS:
        tensor = operation.args[1]
        if not tensor.is_contiguous() and not _is_channels_last(tensor):
            raise ValueError(
                f"all_to_all_single: Tensors must be contiguous, got an input of {_form(tensor)}; "
                "call .contiguous() first"
            )


def refuse_outputs_with_grad(operation: Operation) -> None:
    """Check that autograd has nothing against what gloo writes.

    Raises:
        RuntimeError: an output requires grad, and the call is not made under ``torch.no_grad()``.
    """
    if operation.method in _BY_COPIES and _is_grad_enabled():
        for part in operation.parts:
            for output in part.outputs:
                if output.requires_grad:
                    _refuse_grad(output, operation)


def _form(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"


def _is_channels_last(tensor: Tensor) -> bool:
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


def _refuse_grad(output: Tensor, operation: Operation) -> None:
    if _is_excluded(torch._C.DispatchKey.AutogradFunctionality):
        return  # C++ calls a group below autograd
    base = output._base
    if operation.method in _THROUGH_VIEWS:
        words = "a view of a tensor that requires grad is being modified inplace"
    elif output.is_leaf or (base is not None and base.is_leaf):
        kind = "leaf" if output.is_leaf else "view of a leaf"
        words = f"a {kind} Variable that requires grad is being used in an in-place operation"
    else:
        return
    raise RuntimeError(
        f"{words}: {operation.signature.op} would write to it; call it under torch.no_grad(), or give it .detach()"
    )
