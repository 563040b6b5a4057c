"""One c10d call of one rank: its signature, its tensors, and the call to make on a real group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from pdlcheck.operations.signature import Signature

if TYPE_CHECKING:
    from pdlcheck.operations.method import Method

__all__ = ["Operation", "Part"]


class Part(NamedTuple):
    """The tensors of one collective; a coalesced call has several parts.

    ``inputs`` and ``outputs`` hold one tensor, or one for each member in group order, or none:
    all_reduce, broadcast, reduce 1 -> the same 1; all_gather 1 -> W; reduce_scatter W -> 1; gather 1 -> W on the root;
    scatter W on the root -> 1; all_to_all W -> W; send 1 -> 0; recv 0 -> 1.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class Operation(NamedTuple):
    """One call with its signature and tensors.

    ``method`` and ``args`` are the call as torch made it, so that a real process group can get the same call.
    ``is_async``: the caller may do other work before it waits.
    """

    signature: Signature
    parts: Sequence[Part]
    method: Method
    args: tuple[Any, ...]
    reduce_op: Any = None
    is_async: bool = True
