"""``send`` and ``recv``: messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pdlcheck.operations.gloo import layout_of
from pdlcheck.operations.kind import Moved, OperationKind
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order
from pdlcheck.operations.signature import Signature

__all__ = ["RECV", "SEND"]


class _Send(OperationKind):
    """A send."""

    name = "send"
    has_future = False

    def only_sends(self, signature: Signature) -> bool:
        return True

    def moves(self, operations: Sequence[Operation], parts: Sequence[Sequence[Part]], order: Order) -> Moved:
        """Compute the effect of a send and its receive."""
        sent, taken = parts[0][0].inputs[0], parts[1][0].outputs[0]
        return [[], [(taken, sent.detach().reshape(taken.shape))]]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        signature = operation.signature
        value = mpi.source(operation.parts[0].inputs[0])
        peer = signature.members.index(signature.peer)
        mpi.begun(mpi.communicator.Isend(mpi.raw(value), peer, signature.tag))


class _Recv(OperationKind):
    """A receive, from one rank or from any."""

    name = "recv"
    root_name = "src"
    has_future = False

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        signature = operation.signature
        room = mpi.target(operation.parts[0].outputs[0])
        peer = signature.members.index(signature.peer) if signature.peer >= 0 else mpi.any_source
        mpi.begun(mpi.communicator.Irecv(mpi.raw(room), peer, signature.tag))


def _send(group: Group, tensors: Sequence[Tensor], dstRank: int, tag: int) -> dist.Work:
    """Post a ``send``."""
    return group.post_message(_SEND, tensors[0], dstRank, tag, (tensors, dstRank, tag))


def _recv(group: Group, tensors: Sequence[Tensor], srcRank: int, tag: int) -> dist.Work:
    """Post a ``recv``."""
    return group.post_message(_RECV, tensors[0], srcRank, tag, (tensors, srcRank, tag))


def _recv_anysource(group: Group, tensors: Sequence[Tensor], tag: int) -> dist.Work:
    """Post a ``recv`` from any rank."""
    return group.post_message(_RECV_ANYSOURCE, tensors[0], None, tag, (tensors, tag))


def _refuse_strided(operation: Operation) -> None:
    tensor = operation.args[0][0]
    if not tensor.is_contiguous():
        op = operation.signature.op
        cure = "call .contiguous() first" if op == "send" else "receive a contiguous one, and copy it"
        raise RuntimeError(f"{op}: input tensor has to be contiguous, got {layout_of(tensor)}; {cure}")


_SEND = Method("send", function=_send, check_on_gloo=_refuse_strided)
_RECV = Method("recv", function=_recv, check_on_gloo=_refuse_strided)
_RECV_ANYSOURCE = Method("recv_anysource", function=_recv_anysource, check_on_gloo=_refuse_strided)
SEND = _Send(_SEND)
RECV = _Recv(_RECV, _RECV_ANYSOURCE)
