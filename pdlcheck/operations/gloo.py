"""Calls that gloo refuses on the calling rank, although other worlds could carry them out.

A test that made such a call would pass elsewhere and fail on processes.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from pdlcheck.compat.torch.dispatch import is_below_autograd
from pdlcheck.compat.torch.tensors import base_of
from pdlcheck.operations.operation import Operation

__all__ = [
    "is_channels_last",
    "layout_of",
    "refuse_copies_with_grad",
    "refuse_future",
    "refuse_views_with_grad",
    "validate_for_gloo",
]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def validate_for_gloo(operation: Operation, *, with_grad: bool = True) -> None:
    """Check the arguments of an operation on one rank.

    Args:
        operation: the call; outputs that share memory were refused before.
        with_grad: whether to check for outputs that require grad, too.

    Raises:
        RuntimeError: a message is strided; or an output requires grad, and the call is not under ``torch.no_grad()``.
        ValueError: the input of ``all_to_all_single`` is strided.
    """
    method = operation.method  # most have no such check
    if method.check_on_gloo is not None:
        method.check_on_gloo(operation)
    if with_grad and method.check_grad_on_gloo is not None:
        method.check_grad_on_gloo(operation)


def refuse_future(operation: Operation) -> None:
    """Check that the program may ask for the future of an operation.

    Raises:
        RuntimeError: the operation is a message or a ``reduce_scatter``, whose work has no future.
    """
    if not operation.method.kind.has_future:
        op = operation.signature.op
        raise RuntimeError(f"Work::getFuture not implemented: gloo has no future of a {op}; call wait()")


def refuse_copies_with_grad(operation: Operation) -> None:
    """Check the outputs of a call whose results gloo copies to them: autograd sees the copies.

    Raises:
        RuntimeError: an output, or its base tensor, is a leaf that requires grad.
    """
    for output in _with_grad(operation):
        base = base_of(output)
        if output.is_leaf or (base is not None and base.is_leaf):
            kind = "leaf" if output.is_leaf else "view of a leaf"
            _refuse_grad(f"a {kind} Variable that requires grad is being used in an in-place operation", operation)


def refuse_views_with_grad(operation: Operation) -> None:
    """Check the outputs of a call that gloo fills through views of one flat output: autograd forbids writes to them.

    Raises:
        RuntimeError: an output requires grad.
    """
    for _ in _with_grad(operation):
        _refuse_grad("a view of a tensor that requires grad is being modified inplace", operation)


def layout_of(tensor: Tensor) -> str:
    """Return the shape and the strides of a tensor as text."""
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"


def is_channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor is in ``channels_last`` or ``channels_last_3d``, which gloo takes in some calls."""
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    return memory_format is not None and tensor.is_contiguous(memory_format=memory_format)


def _with_grad(operation: Operation) -> list[Tensor]:
    """Return the outputs to which autograd sees the writes: none in calls from C++, which run below autograd."""
    if not torch.is_grad_enabled():
        return []
    found = [output for part in operation.parts for output in part.outputs if output.requires_grad]
    return [] if found and is_below_autograd() else found


def _refuse_grad(words: str, operation: Operation) -> NoReturn:
    raise RuntimeError(
        f"{words}: {operation.signature.op} would write to it; call it under torch.no_grad(), or give it .detach()"
    )
