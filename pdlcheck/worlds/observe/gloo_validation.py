"""Calls that gloo refuses on the calling rank, although other worlds could carry them out.

A test that made such a call would pass elsewhere and fail on processes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pdlcheck.compat.torch.c10d import FLAT_ALL_GATHER, FLAT_REDUCE_SCATTER
from pdlcheck.compat.torch.dispatch import is_below_autograd
from pdlcheck.compat.torch.tensors import base_of
from pdlcheck.worlds.observe.operation import Operation
from pdlcheck.worlds.observe.signature import Signature

__all__ = ["refuse_future", "validate_for_gloo"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_THROUGH_VIEWS = (  # gloo fills one flat output through views, and autograd forbids writes to them
    *FLAT_ALL_GATHER,
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
)
_BY_COPIES = (  # gloo copies to the outputs, and autograd sees the copies
    *_THROUGH_VIEWS,
    *FLAT_REDUCE_SCATTER,
    "allgather",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "gather",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)


def validate_for_gloo(operation: Operation, *, with_grad: bool = True) -> None:
    """Check the arguments of an operation on one rank.

    Args:
        operation: the call; outputs that share memory were refused before.
        with_grad: whether to check for outputs that require grad, too.

    Raises:
        RuntimeError: a message is strided; or an output requires grad, and the call is not under ``torch.no_grad()``.
        ValueError: the input of ``all_to_all_single`` is strided.
    """
    check = _CHECKS.get(operation.method)  # most calls have none
    if check is not None and (with_grad or check is not _refuse_outputs):
        check(operation)


def refuse_future(signature: Signature) -> None:
    """Check that the program may ask for the future of an operation.

    Raises:
        RuntimeError: the operation is a message or a ``reduce_scatter``, whose work has no future.
    """
    if signature.is_p2p or signature.op == "reduce_scatter":
        raise RuntimeError(f"Work::getFuture not implemented: gloo has no future of a {signature.op}; call wait()")


def _refuse_message(operation: Operation) -> None:
    tensor = operation.args[0][0]
    if not tensor.is_contiguous():
        op = operation.signature.op
        cure = "call .contiguous() first" if op == "send" else "receive a contiguous one, and copy it"
        raise RuntimeError(f"{op}: input tensor has to be contiguous, got {_form(tensor)}; {cure}")


def _refuse_input(operation: Operation) -> None:
    tensor = operation.args[1]
    if not tensor.is_contiguous() and not _is_channels_last(tensor):
        raise ValueError(
            f"all_to_all_single: Tensors must be contiguous, got an input of {_form(tensor)}; call .contiguous() first"
        )


def _refuse_outputs(operation: Operation) -> None:
    if torch.is_grad_enabled():
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
    if is_below_autograd():
        return  # calls from C++ run below autograd
    base = base_of(output)
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


_CHECKS: dict[str, Callable[[Operation], None]] = {
    "all_to_all_single": _refuse_input,
    "alltoall_base": _refuse_input,
    "recv": _refuse_message,
    "recv_anysource": _refuse_message,
    "send": _refuse_message,
    **dict.fromkeys(_BY_COPIES, _refuse_outputs),
}
