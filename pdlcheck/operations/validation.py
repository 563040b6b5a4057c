"""Calls that no backend carries out: a rank gets the error when it makes the call, before it meets another rank.

If the error came later, when the tensors move, the other ranks would go on with outputs that were never written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.compat.torch.tensors import storage_key
from pdlcheck.operations.kind import OperationKind
from pdlcheck.operations.memory_order import refuse_gaps
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.signature import Signature

__all__ = ["refuse"]

_strided = torch.strided
_BITWISE = ("BAND", "BOR", "BXOR")
_NOT_OF_COMPLEX = ("MAX", "MIN", "PRODUCT")
_OF_SOME_DTYPES = ("AVG", *_BITWISE, *_NOT_OF_COMPLEX)
_FLOAT8 = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
_NOT_ADDED = {torch.uint16, torch.uint32, torch.uint64} | _FLOAT8  # neither torch nor gloo has arithmetic for them


def refuse(operation: Operation) -> None:
    """Check the arguments of an operation on one rank.

    Raises:
        RuntimeError: the type that torch's own backends raise.
        NotImplementedError: torch's own backends do not move tensors of this layout.
    """
    method = operation.method
    kind = method.kind
    _refuse_memory(operation, kind)
    signature = operation.signature
    if signature.is_p2p:
        return
    for part in operation.parts:
        _refuse_dtypes(part, signature.op, signature.reduce_op)
        if kind.lists and signature.root in (-1, signature.rank):
            _refuse_lists(part, signature, kind)
        if kind.reads_late:
            _refuse_shared(part, signature, kind)
    if method.check is not None:
        method.check(operation)


def _refuse_memory(operation: Operation, kind: OperationKind) -> None:
    """Check the memory that the tensors of an operation use.

    The elements of the gradient of ``sum()`` share memory. gloo expects as much memory as the shape needs, and writes
    beyond the end.

    Raises:
        RuntimeError: an operation would write to a tensor whose elements share memory.
        NotImplementedError: torch's own backends do not move tensors of this layout.
    """
    for part in operation.parts:
        if kind.one_order and not kind.lists:
            refuse_gaps(operation.signature.op, [*part.inputs, *part.outputs])
        for tensor in part.outputs:
            if tensor.layout is _strided and not tensor.is_contiguous():
                _refuse_overlap(tensor, operation.signature.op)
            elif tensor.layout is not _strided:
                _refuse_layout(tensor, operation.signature, kind)
        for tensor in part.inputs:
            if tensor.layout is not _strided:
                _refuse_layout(tensor, operation.signature, kind)


def _refuse_overlap(tensor: Tensor, op: str) -> None:
    shape, strides = tuple(tensor.shape), tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        raise RuntimeError(
            f"{op} would write to a tensor whose elements share memory: shape {shape}, strides {strides}, as expand() "
            "makes them; call .contiguous() first"
        )


def _refuse_layout(tensor: Tensor, signature: Signature, kind: OperationKind) -> None:
    if not kind.takes_sparse or tensor.layout is not torch.sparse_coo:
        raise NotImplementedError(
            f"{signature.op} moves dense tensors, got layout {tensor.layout}; all_reduce alone takes sparse ones, in "
            "COO layout: call .to_dense() first"
        )
    if signature.reduce_op != "SUM":
        raise RuntimeError(
            f"{signature.op} of sparse tensors has ReduceOp.SUM alone, got {signature.reduce_op}; call .to_dense() "
            "first"
        )


def _refuse_lists(part: Part, signature: Signature, kind: OperationKind) -> None:
    op, size, own = signature.op, len(signature.members), signature.members.index(signature.rank)
    for name in kind.lists:
        tensors = getattr(part, name)
        if len(tensors) != size:
            raise RuntimeError(f"{op} needs {size} {name}, one for each rank of the group, got {len(tensors)}")
    if kind.pieces == "none":
        return
    is_own = kind.pieces == "own"  # the other pieces may have any length
    inputs = part.inputs[own : own + 1] if is_own else part.inputs
    if len({tensor.shape for tensor in (*inputs, *part.outputs)}) > 1:
        gives, takes = _shapes("input", inputs), _shapes("output", part.outputs)
        cure = "" if is_own else "; pad tensors whose sizes differ between ranks, and cut them after it"
        raise RuntimeError(f"{op} needs tensors of one shape, got {gives} and {takes}{cure}")


def _refuse_shared(part: Part, signature: Signature, kind: OperationKind) -> None:
    """Raise if the input for one rank and the output from another share memory.

    Some data arrives before the rest has been sent, and would overwrite it.
    """
    inputs, outputs = ([*map(_place, tensors)] for tensors in part)
    if {storage for storage, _ in inputs}.isdisjoint({storage for storage, _ in outputs}):
        return
    own = signature.members.index(signature.rank)
    first = 0 if "outputs" in kind.lists else own  # the number of the rank from which the first output comes
    for target, read in enumerate(inputs):
        for source, written in enumerate(outputs, first):
            if not target == source == own and _overlap(read, written):
                comes_from, goes_to = signature.members[source], signature.members[target]
                raise RuntimeError(
                    f"{signature.op} would write what comes from rank {comes_from} to memory from which it reads what "
                    f"goes to rank {goes_to}; give it an output of its own, such as torch.empty_like(input)"
                )


def _place(tensor: Tensor) -> tuple[int, range]:
    """Return the storage of a tensor, and the range of bytes that it uses.

    The range is empty if the tensor is not contiguous, because it may use only some bytes of a range.
    """
    begin, nbytes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    return storage_key(tensor.untyped_storage()), range(begin, begin + nbytes * tensor.is_contiguous())


def _overlap(one: tuple[int, range], other: tuple[int, range]) -> bool:
    (storage, some), (other_storage, others) = one, other
    return storage == other_storage and max(some.start, others.start) < min(some.stop, others.stop)


def _shapes(name: str, tensors: Sequence[Tensor]) -> str:
    """Return a phrase such as ``an input of (2,)`` or ``outputs of (2,), (3,)``."""
    who = f"{name}s" if len(tensors) > 1 else f"an {name}"
    return f"{who} of {', '.join(sorted({str(tuple(x.shape)) for x in tensors}))}"


def _refuse_dtypes(part: Part, op: str, reduce_op: str) -> None:
    dtypes = {tensor.dtype for tensor in (*part.inputs, *part.outputs)}
    if len(dtypes) > 1:
        raise RuntimeError(f"{op} needs tensors of one dtype, got {', '.join(sorted(map(str, dtypes)))}")
    if reduce_op in _OF_SOME_DTYPES and dtypes:
        (dtype,) = dtypes
        whole = not (dtype.is_floating_point or dtype.is_complex)
        if reduce_op == "AVG" and whole:
            raise RuntimeError(f"ReduceOp.AVG needs a floating-point tensor, got {dtype}; use SUM")
        if reduce_op in _BITWISE and not whole:
            raise RuntimeError(f"ReduceOp.{reduce_op} needs a tensor of integers, got {dtype}; use another reduce-op")
        if reduce_op in _NOT_OF_COMPLEX and dtype.is_complex:
            raise RuntimeError(f"ReduceOp.{reduce_op} does not take complex tensors, got {dtype}; use SUM")
    if reduce_op and dtypes & _NOT_ADDED:
        cure = "torch.float32" if dtypes & _FLOAT8 else "torch.int64"
        raise RuntimeError(f"ReduceOp.{reduce_op} does not take {min(map(str, dtypes))}; use {cure}")
